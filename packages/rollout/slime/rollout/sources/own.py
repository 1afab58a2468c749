"""`--data-source-path`: prompts from a class of the user, passed through a buffer.

    own = OwnSource.open(path, args)            # CLASS(args), once for a service
    with OwnLeases(buffer, own, worker_id=...) as source:
        source.get_samples(4)                   # 4 groups of CLASS.get_samples, leased
        source.add_samples(unfinished)          # CLASS.add_samples

A group of the class becomes a group of the buffer: if an iteration does not finish it, it is leased again, also by
another process, before the class is asked for more. A group that is given to `add_samples` belongs to the class alone.
"""

from __future__ import annotations

import copy
import logging
import threading
from typing import TYPE_CHECKING, Any, Protocol

from slime.rollout.sources.leased import BufferCalls, LeasedDataSource
from slime.types import Sample
from slime.types.errors import PluginError, SlimeError, counted
from slime.types.plugins import load_plugin

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs

FLAG = "--data-source-path"
RETURNED = "returned to the data source"

log = logging.getLogger(__name__)


class OwnSource:
    """The user's data source, and its groups that are in the buffer, as it gave them."""

    def __init__(self, source: Any, path: str, args: RolloutArgs) -> None:
        self.source = source
        self.path = path
        self.args = args
        self.given: dict[int, list[Sample]] = {}
        self.lock = threading.RLock()
        # True for a source of single samples.
        self.flat = False
        self._loaded = False

    @classmethod
    def open(cls, path: str, args: RolloutArgs) -> OwnSource:
        """Makes the user's object. args: every setting of the run. The class gets them with the directories of
        checkpoints as `save` and `load`.

        Raises PluginError for a path that does not lead to a data source; a SlimeError of the class is passed on.
        """
        own_args: Any = copy.copy(args)
        own_args.save = getattr(args, "checkpoint_dir", None) or getattr(args, "save", None)
        own_args.load = getattr(args, "load_root", None) or getattr(args, "load", None)
        make = load_plugin(path, flag=FLAG)
        try:
            source = make(own_args)
        except SlimeError:
            raise
        except Exception as error:
            raise PluginError(
                f"{FLAG} {path}: making it raised {type(error).__name__}: {error}", field=FLAG, value=path
            ) from error
        missing = [name for name in ("get_samples", "add_samples", "save", "load") if not hasattr(source, name)]
        if missing:
            raise PluginError(
                f"{FLAG} {path}: a {type(source).__name__} has no {missing[0]}, expected get_samples(n), "
                "add_samples(groups), save(rollout_id) and load(rollout_id)",
                field=FLAG,
                value=path,
                expected=missing[0],
            )
        return cls(source, path, own_args)

    def begin(self, rollout_id: int) -> None:
        """Makes the class load its last saved state, before the first iteration of this process only."""
        with self.lock:
            if not self._loaded and rollout_id > 0:
                self.source.load(rollout_id - 1)
            self._loaded = True

    def end(self, rollout_id: int) -> None:
        """Makes the class save its state after an iteration, in a run that writes checkpoints."""
        if getattr(self.args, "save_interval", None) is not None:
            with self.lock:
                self.source.save(rollout_id)

    def take(self, count: int, group_size: int) -> list[list[Sample]]:
        """Takes `count` new groups; of a source of single samples, each sample makes one. Raises PluginError for an
        answer of another shape."""
        groups = self.source.get_samples(count)
        if isinstance(groups, list) and groups and all(isinstance(sample, Sample) for sample in groups):
            self.flat = True
            # The dataset class of slime sets only the prompts of these samples.
            fill_labels = getattr(getattr(self.source, "dataset", None), "fill_labels", None)
            if fill_labels is not None:
                fill_labels(groups)
            groups = [[copy.deepcopy(sample) for _ in range(group_size)] for sample in groups]
        if not isinstance(groups, list) or len(groups) > count:
            got = counted(len(groups), "group") if isinstance(groups, list) else type(groups).__name__
            raise self._wrong(got, f"a list of at most {counted(count, 'group')}")
        for group in groups:
            if not isinstance(group, list) or not all(isinstance(sample, Sample) for sample in group):
                raise self._wrong(f"a {type(group).__name__} in it", "groups: lists of Samples")
            if len(group) != group_size:
                raise self._wrong(f"a group of {len(group)}", f"--n-samples-per-prompt {group_size} Samples")
        return groups

    def _wrong(self, got: str, expected: str) -> PluginError:
        return PluginError(
            f"{FLAG} {self.path}: get_samples answered {got}, expected {expected}",
            field=FLAG, value=got, expected=expected,
        )  # fmt: skip


class OwnBufferCalls(BufferCalls, Protocol):
    """The methods of `slime.types.clients.BufferClient` that are used here."""

    def stats(self) -> Any: ...
    def add_prompts(self, prompts: list[dict[str, Any]]) -> Any: ...


class OwnLeases(LeasedDataSource):
    """Data source of a rollout function: a leased source with any other attribute of the user's object."""

    buffer: OwnBufferCalls

    def __init__(self, buffer: OwnBufferCalls, own: OwnSource, *, group_size: int, **options: Any) -> None:
        super().__init__(buffer, **options)
        self.own = own
        self.group_size = group_size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "own" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.own.source, name)

    def __len__(self) -> int:
        return len(self.own.source)

    def __bool__(self) -> bool:
        return True

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Takes groups that wait in the buffer, then new ones. Raises DeadlineExceeded if none comes in time."""
        with self.own.lock:
            missing = num_samples - self.buffer.stats().groups.get("ready", 0)
            groups = self.own.take(missing, self.group_size) if missing > 0 else []
            if groups:
                prompts = [
                    {"prompt": group[0].prompt, "label": group[0].label, "metadata": group[0].metadata}
                    for group in groups
                ]
                first = self.buffer.add_prompts(prompts).first_group_index
                self.own.given.update((first + position, group) for position, group in enumerate(groups))
        return super().get_samples(num_samples)

    def _take(self, lease: Any) -> list[Sample] | None:
        group = lease.group
        given = self.own.given.get(group.group_index)
        if given is not None:
            # Copied, so that the original is unchanged if the group is leased again.
            for sample, leased in zip(copied := copy.deepcopy(given), group.samples, strict=True):
                sample.group_index, sample.index = leased.group_index, leased.index
            group.samples = copied
        return super()._take(lease)

    def _unknown_name(self, group: list[Sample]) -> SlimeError | None:
        # The user's own code set the names in groups of the class, so they are trusted.
        return None if self.find(group) in self.own.given else super()._unknown_name(group)

    def add_samples(self, groups: list[list[Sample]]) -> None:
        for group in groups:
            if self.find(group) is not None:
                self.reject(group, RETURNED)
        with self.own.lock:
            self.own.source.add_samples([s for group in groups for s in group] if self.own.flat else groups)

    def reject(self, group: list[Sample], reason: str) -> None:
        index = self.find(group)
        super().reject(group, reason)
        if index is not None:
            self.own.given.pop(index, None)

    def _complete_as(self, index: int, samples: list[Sample]) -> None:
        super()._complete_as(index, samples)
        self.own.given.pop(index, None)
