"""Takes groups out of the run: dropped by an operator, or set aside because their samples cannot be read.

A sealed group takes its step with it: that step and all later ones are unsealed, their other groups are COMPLETED again
and their plans are forgotten, so that sealing them again takes the next groups in order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from slime.buffer.groups.samples import encoded_samples
from slime.buffer.groups.steps import Steps
from slime.buffer.store.base import NO_LEASE, NO_PAYLOAD, CompletedGroup, Group, Payloads, State, Store
from slime.types.errors import DataLoss, InvalidField, NotFound, WrongState

log = logging.getLogger(__name__)

TRAINED = (State.ACKNOWLEDGED, State.COMMITTED)
PAGE = 64


class Quarantine:
    """Takes groups out of the run. Unless they say otherwise, methods that write are called inside a transaction."""

    def __init__(self, store: Store, payloads: Payloads, steps: Steps, on_unsealed: Callable[[], None]) -> None:
        """on_unsealed: called when groups are COMPLETED again."""
        self.store = store
        self.payloads = payloads
        self.steps = steps
        self.on_unsealed = on_unsealed

    def drop(self, indexes: Sequence[int], reason: str, *, keep: bool) -> tuple[list[int], list[str]]:
        """Drops groups; returns (steps to seal again, payloads to delete once the transaction is over).

        keep: make them QUARANTINED with their samples rather than REJECTED without. Raises NotFound, or WrongState for
        groups that were trained on.
        """
        if not indexes:
            raise InvalidField("group_indexes", "none", "at least one group")
        groups = {group.group_index: group for group in self.store.groups(indexes=list(set(indexes)))}
        for index in indexes:
            if index not in groups:
                raise NotFound(f"no group {index}", field="group_indexes", value=index, expected="a group's index")
            if groups[index].state in TRAINED:
                raise WrongState(
                    f"group {index} is {groups[index].state}: step {groups[index].step} was trained with it",
                    field="group_indexes",
                    value=index,
                    expected="a group that no step was trained with",
                )
        # A rejected group is counted for the step during which it was rejected.
        sealed = [group for group in groups.values() if group.state is State.SEALED]
        steps = self.steps.unseal(group.step for group in sealed if group.step is not None)
        state = State.QUARANTINED if keep else State.REJECTED
        columns = NO_LEASE | {"state": state, "step": None, "reject_reason": reason or "dropped"}
        self.store.update_groups(groups, **columns if keep else columns | NO_PAYLOAD)
        self._unsealed(steps)
        log.warning("groups %s are %s: %s", sorted(groups), state, reason or "dropped")
        return steps, [] if keep else [group.payload for group in groups.values() if group.payload is not None]

    def damaged(self, group: Group | CompletedGroup, error: DataLoss) -> Group:
        """Handles a group whose samples cannot be read, and returns it as it is then: a READY or LEASED group starts
        again from its prompt, a COMPLETED or SEALED one is QUARANTINED."""
        (current,) = self.store.groups(indexes=[group.group_index])
        if current.payload != group.payload or current.payload is None or current.state is State.QUARANTINED:
            return current
        self.store.put("damaged_payloads", self.store.get("damaged_payloads", 0) + 1)
        if current.state in (State.READY, State.LEASED):
            log.error("group %d goes back to its prompt, its samples are lost: %s", current.group_index, error)
            self.payloads.set_aside(current.payload)
            self.store.update_groups([current.group_index], **NO_PAYLOAD)
        elif current.state in (State.COMPLETED, State.SEALED):
            log.error("group %d is set aside: %s", current.group_index, error)
            sealed_in = [current.step] if current.state is State.SEALED and current.step is not None else []
            steps = self.steps.unseal(sealed_in)
            self.store.update_groups(
                [current.group_index], state=State.QUARANTINED, step=None, reject_reason=f"damaged: {error.message}"
            )
            self._unsealed(steps)
        else:
            log.error("samples of group %d, which is %s, are lost: %s", current.group_index, current.state, error)
        return self.store.groups(indexes=[group.group_index])[0]

    def check_sizes(self, groups: Sequence[CompletedGroup]) -> bool:
        """Returns whether all payloads of `groups` have their stored sizes; marks the groups of others as damaged."""
        whole = True
        for group in groups:
            size = None if group.payload is None else self.payloads.size(group.payload)
            if size != group.payload_bytes:
                whole = False
                found = "gone" if size is None else f"of {size} bytes, expected {group.payload_bytes}"
                self.damaged(group, DataLoss(f"payload {group.payload} is {found}", field="payload"))
        return whole

    def check(self, states: Sequence[State]) -> int:
        """Reads the samples of all groups in `states`; returns the number of damaged groups.

        Opens transactions of its own.
        """
        num_damaged = 0
        after: int | None = None
        while page := self.store.groups(states=states, after=after, limit=PAGE):
            after = page[-1].group_index
            for group in page:
                error = self.problem(group)
                if error is not None:
                    num_damaged += 1
                    with self.store.transaction():
                        self.damaged(group, error)
        return num_damaged

    def problem(self, group: Group) -> DataLoss | None:
        """Returns the reason why the samples of a group cannot be read; None if they can."""
        if group.payload is None:
            return None
        try:
            encoded_samples(group, self.payloads, range(len(group.sizes)))
        except DataLoss as error:
            return error
        return None

    def _unsealed(self, steps: Sequence[int]) -> None:
        if steps:
            log.warning("steps %s have to be sealed and planned again", list(steps))
            self.on_unsealed()
