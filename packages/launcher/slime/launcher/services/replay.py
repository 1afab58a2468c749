"""Puts recorded rollouts into the buffer, in place of generated ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from slime.rollout.metrics import rollout_metrics
from slime.rollout.prompts.encoder import unrendered
from slime.rollout.recordings.paths import path_of
from slime.rollout.recordings.rollouts import head_and_tail, read_rollout
from slime.rollout.settings.rollout import RolloutSettings
from slime.types import SampleGroup
from slime.types.clients import BufferClient
from slime.types.errors import InvalidFile, counted

FLAG = "--load-debug-rollout-data"
LEASE_SECONDS = 600.0
WAIT_SECONDS = 60.0


class Replay:
    """Completes groups with recorded samples. args: every setting of the run by name."""

    WORKER = "replay"

    def __init__(self, buffer: BufferClient, args: dict[str, Any]) -> None:
        self._buffer = buffer
        self._args = SimpleNamespace(**args)

    def generate(self, rollout_id: int) -> tuple[int, dict[str, float]]:
        """Completes the groups of the recorded iteration in the buffer; returns (number of groups, metrics).

        Raises MissingFile or InvalidFile naming its file.
        """
        args = self._args
        path = path_of(args.load_debug_rollout_data, rollout_id)
        recorded = read_rollout(path, flag=FLAG, group_size=args.n_samples_per_prompt)
        groups = [group for group in recorded.groups if group.samples]
        if args.load_debug_rollout_data_subsample is not None and groups:
            groups = head_and_tail(groups, args.load_debug_rollout_data_subsample)
        if not groups:
            raise InvalidFile(f"{FLAG}: {path} has no samples", field=FLAG, value=str(path), expected="samples")
        # Steps take groups in the order in which clients added them.
        self._buffer.add_prompts([_prompt(group) for group in groups], key=f"replay-{rollout_id}")
        leased: list[Any] = []
        while len(leased) < len(groups):
            more = self._buffer.lease_groups(len(groups) - len(leased), LEASE_SECONDS, WAIT_SECONDS, self.WORKER)
            assert more, "the buffer has as many groups as were just added"
            leased += more
        leased.sort(key=lambda lease: lease.group.group_index)
        for group, lease in zip(groups, leased, strict=True):
            self._take_place(group, lease.group, str(path))
            self._buffer.complete_group(lease.token, group.samples)
        return len(groups), rollout_metrics([group.samples for group in groups], cast(RolloutSettings, args))

    def _take_place(self, group: SampleGroup, leased: SampleGroup, path: str) -> None:
        """Sets the indexes of the samples to those of a leased group; samples that shared an index still do."""
        places: dict[Any, int | None] = {}
        for position, sample in enumerate(group.samples):
            key = ("position", position) if sample.index is None else ("index", sample.index)
            if key not in places and len(places) < len(leased.samples):
                places[key] = leased.samples[len(places)].index
            sample.index = places.get(key)
            sample.group_index = leased.group_index
        found = len({s.index for s in group.samples})
        if found != len(leased.samples) or None in {s.index for s in group.samples}:
            raise InvalidFile(
                f"{FLAG}: {path}: a group without {counted(len(leased.samples), 'response')}; expected "
                f"--n-samples-per-prompt to be what it was recorded with",
                field="--n-samples-per-prompt",
                value=len(leased.samples),
                expected="the number of the recorded run",
            )


def _prompt(group: SampleGroup) -> dict[str, Any]:
    return {"prompt": unrendered(group.samples[0])}
