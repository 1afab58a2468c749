"""`TrainerPace`: how far generation may run ahead of the trainer, in versions of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from slime.types.errors import InvalidField
from slime.v1 import buffer_pb2

WAIT, DROP, KEEP = POLICIES = ("wait", "drop", "keep")
_PREFIX = "STALENESS_POLICY_"


@dataclass(frozen=True)
class TrainerPace:
    """The pace of a trainer. max_staleness: the most weight versions between the oldest token of a group and the step
    that trains on it.

    policy: how a step is sealed if a group would exceed max_staleness: "wait" for the groups that are due, "drop" the
    groups that are too old, or "keep" them. groups_per_step: groups that each step trains on. stop_step: the step after
    the last one. weight_version: the version that the engines hold; used only to lease groups.
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
        """Converts a message. Raises InvalidField naming the field."""
        for name, minimum in (("max_staleness", 0), ("groups_per_step", 1), ("stop_step", 0), ("weight_version", 0)):
            if getattr(message, name) < minimum:
                raise InvalidField(f"pace.{name}", getattr(message, name), f"at least {minimum}")
        if message.policy not in buffer_pb2.StalenessPolicy.values() or not message.policy:
            raise InvalidField("pace.policy", message.policy, "one of WAIT, DROP and KEEP")
        return cls(
            max_staleness=message.max_staleness,
            groups_per_step=message.groups_per_step,
            stop_step=message.stop_step,
            policy=buffer_pb2.StalenessPolicy.Name(message.policy).removeprefix(_PREFIX).lower(),
            weight_version=message.weight_version,
        )
