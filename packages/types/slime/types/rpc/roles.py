"""Roles of callers, and the calls that each may make.

The token of a service permits every call. The token of a role is derived from it and permits the calls that list the
role below; from it neither the service's token nor that of another role can be derived. A call that is not listed needs
the service's own token.
"""

from __future__ import annotations

import hashlib
import hmac
from enum import StrEnum


class Role(StrEnum):
    FEED = "feed"  # adds prompts
    ROLLOUT = "rollout"  # leases groups, returns and completes them
    TRAIN = "train"  # seals and reads steps, sends weights, writes checkpoints
    READ = "read"  # reads, and changes nothing


EVERY_ROLE = frozenset(Role)
_ROLLOUT = frozenset({Role.ROLLOUT})
_TRAIN = frozenset({Role.TRAIN})
_LOOK = frozenset({Role.READ, Role.ROLLOUT, Role.TRAIN})

CALLERS: dict[str, frozenset[Role]] = {
    "/slime.v1.BufferService/OpenRun": _TRAIN,
    "/slime.v1.BufferService/GetRun": _LOOK,
    "/slime.v1.BufferService/AddPrompts": frozenset({Role.FEED}),
    "/slime.v1.BufferService/LeaseGroups": _ROLLOUT,
    "/slime.v1.BufferService/RenewLeases": _ROLLOUT,
    "/slime.v1.BufferService/ReturnGroup": _ROLLOUT,
    "/slime.v1.BufferService/CompleteGroup": _ROLLOUT,
    "/slime.v1.BufferService/CompleteGroups": _ROLLOUT,
    "/slime.v1.BufferService/RejectGroup": _ROLLOUT,
    "/slime.v1.BufferService/RequeueGroups": _TRAIN,
    "/slime.v1.BufferService/SealStep": _TRAIN,
    "/slime.v1.BufferService/StorePlan": _TRAIN,
    "/slime.v1.BufferService/GetPlan": _TRAIN,
    "/slime.v1.BufferService/ReadStep": _TRAIN,
    "/slime.v1.BufferService/ReadPlace": _TRAIN,
    "/slime.v1.BufferService/AcknowledgeStep": _TRAIN,
    "/slime.v1.BufferService/CommitSteps": _TRAIN,
    "/slime.v1.BufferService/RewindSteps": _TRAIN,
    "/slime.v1.BufferService/ReadGroups": _LOOK,
    "/slime.v1.BufferService/ListGroups": _LOOK,
    "/slime.v1.BufferService/DropGroups": _TRAIN,
    "/slime.v1.BufferService/ReadEvaluationSet": _LOOK,
    "/slime.v1.BufferService/GetStats": EVERY_ROLE,
    "/slime.v1.RolloutService/GetStatus": _LOOK,
    "/slime.v1.RolloutService/Generate": _TRAIN,
    "/slime.v1.RolloutService/Evaluate": _TRAIN,
    "/slime.v1.RolloutService/BeginWeightUpdate": _TRAIN,
    "/slime.v1.RolloutService/CommitWeightUpdate": _TRAIN,
    "/slime.v1.RolloutService/AbortWeightUpdate": _TRAIN,
    "/slime.v1.RolloutService/Offload": _TRAIN,
    "/slime.v1.RolloutService/Onload": _TRAIN,
    "/slime.v1.RolloutService/AddEngine": _TRAIN,
    "/slime.v1.RolloutService/RemoveEngine": _TRAIN,
    "/slime.v1.TrainerService/GetInfo": _LOOK,
    "/slime.v1.TrainerService/TrainStep": _TRAIN,
    "/slime.v1.TrainerService/UpdateWeights": _TRAIN,
    "/slime.v1.TrainerService/SaveCheckpoint": _TRAIN,
    "/slime.v1.TrainerService/ExportModel": _TRAIN,
}
REFLECTION = "/grpc.reflection."


def callers(method: str) -> frozenset[Role]:
    """Returns the roles that may call `method`, "/package.Service/Method"."""
    return EVERY_ROLE if method.startswith(REFLECTION) else CALLERS.get(method, frozenset())


def role_token(token: str, role: Role) -> str:
    """Derives the token of `role` from a service's own, by HMAC with SHA-256."""
    return f"slime-{role}-{hmac.new(token.encode(), f'slime role {role}'.encode(), hashlib.sha256).hexdigest()}"
