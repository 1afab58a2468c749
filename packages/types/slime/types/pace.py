"""`TrainerPace`: how far generation may run ahead of the trainer, in versions of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from slime.types.errors import InvalidField
from slime.v1 import buffer_pb2

WAIT, DROP, KEEP = POLICIES = ("wait", "drop", "keep")
_PREFIX = "STALENESS_POLICY_"


@dataclass(frozen=True)
class TrainerPace:
    """The pace of a trainer. max_staleness: most versions between the oldest token of a group and the step that trains
    on it.

    policy: how a step is sealed where a group would exceed it: "wait" for the groups that are due, "drop" those that
    are too old, "keep" them. groups_per_step: of every step. stop_step: the step after the last one.
    weight_version: of the engines, when groups are leased.
    """

    max_staleness: int
    groups_per_step: int
    stop_step: int
    policy: str = WAIT
    weight_version: int = 0

    def to_proto(self) -> buffer_pb2.Pace:
        return buffer_pb2.Pace(
            max_staleness=self.max_staleness,
            policy=_PREFIX + self.policy.upper(),
            groups_per_step=self.groups_per_step,
            stop_step=self.stop_step,
            weight_version=self.weight_version,
        )

    @classmethod
    def from_proto(cls, message: buffer_pb2.Pace) -> TrainerPace:
        """Raises InvalidField naming the field."""
        for name, least in (("max_staleness", 0), ("groups_per_step", 1), ("stop_step", 0), ("weight_version", 0)):
            if getattr(message, name) < least:
                raise InvalidField(f"pace.{name}", getattr(message, name), f"at least {least}")
        if message.policy not in buffer_pb2.StalenessPolicy.values() or not message.policy:
            raise InvalidField("pace.policy", message.policy, "one of WAIT, DROP and KEEP")
        return cls(
            max_staleness=message.max_staleness,
            groups_per_step=message.groups_per_step,
            stop_step=message.stop_step,
            policy=buffer_pb2.StalenessPolicy.Name(message.policy).removeprefix(_PREFIX).lower(),
            weight_version=message.weight_version,
        )
