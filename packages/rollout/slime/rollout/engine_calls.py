"""The calls of the rollout service by which engines join and leave a run."""

from __future__ import annotations

import grpc

from slime.rollout.fleet.engine_weights import EngineWeights
from slime.rollout.fleet.external import LEAVE_SECONDS, ExternalEngines
from slime.rollout.fleet.member import LEARN_SECONDS, Member
from slime.rollout.generate.state import RolloutState
from slime.rollout.launch import check_images, check_member, engine_url, external_key
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.errors import WrongState
from slime.v1 import rollout_pb2, rollout_pb2_grpc


class EngineCalls(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers AddEngine and RemoveEngine."""

    def __init__(self, settings: RolloutSettings, state: RolloutState, weights: EngineWeights) -> None:
        self.settings = settings
        self.state = state
        self.fleet = state.fleet
        self.engine_weights = weights
        self._external: ExternalEngines | None = None
        if settings.rollout_external_engine_addrs:
            self._external = ExternalEngines(weights, external_key(settings), self._check)

    @property
    def engines_may_join(self) -> bool:
        return self._external is not None

    def AddEngine(
        self, request: rollout_pb2.AddEngineRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.AddEngineResponse:
        external = self._changing("join")
        member = self.fleet.loop.run(external.add(engine_url(request.url, "url")), timeout=LEARN_SECONDS + 30)
        return rollout_pb2.AddEngineResponse(engine=self._engine_message(member))

    def RemoveEngine(
        self, request: rollout_pb2.RemoveEngineRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.RemoveEngineResponse:
        external = self._changing("leave")
        self.fleet.loop.run(external.remove(engine_url(request.url, "url")), timeout=LEAVE_SECONDS + 30)
        return rollout_pb2.RemoveEngineResponse()

    def _changing(self, verb: str) -> ExternalEngines:
        if self._external is None:
            raise WrongState(
                f"engines cannot {verb}: the run has started its engines itself", field="url",
                expected="a run with --rollout-external-engine-addrs",
            )  # fmt: skip
        return self._external

    def _check(self, member: Member) -> None:
        check_member(self.settings, member)
        if getattr(self.state.args, "multimodal_keys", None):
            check_images(self.settings.hf_checkpoint, [member])

    @property
    def num_lost(self) -> int:
        """The number of engines, of all models, that died or hung, and were restarted or left."""
        return self.fleet.num_lost + sum(fleet.num_lost for fleet in self.state.models.values())

    def _engine_messages(self) -> list[rollout_pb2.Engine]:
        """Returns the engines of the trained model, and then those of the others."""
        others = [
            rollout_pb2.Engine(
                name=member.name, url=member.url, kind=member.kind.name, weight_version=member.weight_version,
                healthy=member.healthy, tp_size=member.abilities.tp_size, in_flight=fleet.router.load_of(member),
                model=name, keeps_weights=True,
            )
            for name, fleet in self.state.models.items()
            for member in fleet.members
        ]  # fmt: skip
        return [self._engine_message(member) for member in self.fleet.members] + others

    def _first_rank(self, member: Member) -> int:
        members = self.fleet.members
        before = members[: members.index(member)] if member in members else members
        return sum(other.abilities.tp_size for other in before)

    def _engine_message(self, member: Member) -> rollout_pb2.Engine:
        return rollout_pb2.Engine(
            name=member.name, url=member.url, kind=member.kind.name, weight_version=member.weight_version,
            healthy=member.healthy and self.engine_weights.stopped is None, tp_size=member.abilities.tp_size,
            weight_transports=member.kind.weight_transports, delta_carriers=member.delta_carriers,
            awaits_weights=member.awaits_weights, in_flight=self.fleet.router.load_of(member),
            first_rank=self._first_rank(member),
            model=next((model.name for model in self.settings.served_models if model.trained), ""),
        )  # fmt: skip
