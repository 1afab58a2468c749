"""Data sources inside one process, for plug-ins: classes of `--data-source-path`, and their base classes.

The arguments of the constructor choose between two kinds:

- `RolloutDataSource(args)`: groups. `get_samples(n)` returns n lists of `args.n_samples_per_prompt` Samples;
  the prompts come from `args.prompt_data`.
- `RolloutDataSource(dataset, args)`: flat. `get_samples(n)` returns n Samples; `dataset` has `sample(n)`, or is a list
  of prompts (text, chat messages, or Samples).

A run over services uses the buffer instead, whose state is durable; here only `save` and `load` keep state.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slime.buffer.filters import FLAG, pop_first
from slime.buffer.sources.base import Columns, Prompt
from slime.buffer.sources.dataset import Cursor, Dataset, read_dataset
from slime.types import Sample
from slime.types.errors import InvalidField, InvalidSetting, MissingFile, WrongState, counted
from slime.types.models.vision import IMAGE

__all__ = ["DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer", "pop_first"]


class DataSource(ABC):
    """The contract of `--data-source-path`, which names a class that is called with `args`."""

    @abstractmethod
    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Returns `num_samples` groups."""

    @abstractmethod
    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Takes groups back."""

    @abstractmethod
    def save(self, rollout_id: int) -> None: ...

    @abstractmethod
    def load(self, rollout_id: int | None = None) -> None: ...

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of prompts."""


class RolloutDataSource(DataSource):
    """Prompts of a dataset, epoch after epoch."""

    # Defaults for flat subclasses, which need not call __init__.
    flat = True
    sample_group_index = 0
    sample_index = 0
    _prompts: Dataset | None = None
    _cursor = Cursor()

    @classmethod
    def from_args(cls, args: Any) -> RolloutDataSource:
        """Returns `cls(args)`; a class whose constructor takes `(dataset, args)` gets the prompts of `args.prompt_data`
        as its dataset."""
        parameters = inspect.signature(cls).parameters.values()
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len([p for p in positional if p.default is p.empty]) == 2:
            return cls(PromptSequence(_read(args)), args)
        return cls(args)

    def __init__(self, *dataset_and_args: Any) -> None:
        if len(dataset_and_args) not in (1, 2):
            raise TypeError(f"expected (args) or (dataset, args), got {counted(len(dataset_and_args), 'argument')}")
        self.args = dataset_and_args[-1]
        self.flat = len(dataset_and_args) == 2
        self.dataset: Any = dataset_and_args[0] if self.flat else None
        self._prompts = _sequence(self.dataset) if self.flat else _read(self.args)
        self._cursor = Cursor()
        self.sample_group_index = 0
        self.sample_index = 0
        self.metadata: dict[str, Any] = {}

    @property
    def epoch_id(self) -> int:
        return self._cursor.epoch

    @property
    def sample_offset(self) -> int:
        return self._cursor.offset

    def get_samples(self, num_samples: int) -> list[Any]:
        if self.flat:
            if self._prompts is None:
                return [_sample(prompt) for prompt in self.dataset.sample(num_samples)]
            return [self._number(sample) for sample in self._take(num_samples)]
        return [self._group(template) for template in self._take(num_samples)]

    def _take(self, count: int) -> list[Sample]:
        if self._prompts is None:
            # --disable-rollout-global-dataset: a subclass, or the user's rollout function, fills the samples.
            return [Sample() for _ in range(count)]
        prompts, self._cursor = self._prompts.take(self._cursor, count)
        return [_sample(prompt) for prompt in prompts]

    def _group(self, template: Sample) -> list[Sample]:
        group = [self._number(copy.deepcopy(template)) for _ in range(self.group_size)]
        self.sample_group_index += 1
        return group

    def _number(self, sample: Sample) -> Sample:
        sample.group_index = self.sample_group_index
        sample.index = self.sample_index
        self.sample_index += 1
        if self.flat:
            self.sample_group_index += 1
        return sample

    @property
    def group_size(self) -> int:
        return getattr(self.args, "n_samples_per_prompt", 1)

    def add_samples(self, samples: list[Any]) -> None:
        """Does nothing in a flat source; otherwise raises WrongState, because this class cannot keep samples."""
        if samples and not self.flat:
            raise WrongState(f"{type(self).__name__} takes no samples back: use RolloutDataSourceWithBuffer")

    def save(self, rollout_id: int) -> None:
        """Writes the place in the data below `args.save`; does nothing if that is not set."""
        path = self._state_path("save", rollout_id)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(self.state()))
        os.replace(partial, path)

    def load(self, rollout_id: int | None = None) -> None:
        """Reads the file of `save` below `args.load`; does nothing without `args.load` or `rollout_id`.

        Raises MissingFile.
        """
        path = None if rollout_id is None or rollout_id < 0 else self._state_path("load", rollout_id)
        if path is None:
            return
        if not path.is_file():
            raise MissingFile(f"--load: no data source state at {path}", field="--load", value=str(path))
        self.set_state(json.loads(path.read_text()))

    def _state_path(self, setting: str, rollout_id: int) -> Path | None:
        directory = getattr(self.args, setting, None)
        if not directory or not getattr(self.args, "rollout_global_dataset", True):
            return None
        return Path(directory) / "rollout" / f"global_dataset_state_dict_{rollout_id}.json"

    def state(self) -> dict[str, Any]:
        return {
            "sample_offset": self._cursor.offset,
            "epoch_id": self._cursor.epoch,
            "sample_group_index": self.sample_group_index,
            "sample_index": self.sample_index,
            "metadata": self.get_metadata(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._cursor = Cursor(state["epoch_id"], state["sample_offset"])
        self.sample_group_index = state["sample_group_index"]
        self.sample_index = state["sample_index"]
        self.metadata = state["metadata"]

    def get_metadata(self) -> dict[str, Any]:
        return self.__dict__.setdefault("metadata", {})

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        self.get_metadata().update(metadata)

    def __len__(self) -> int:
        return len(self.dataset if self._prompts is None and self.flat else self._prompts or ())


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Returns samples from `add_samples` before it takes more from the dataset.

    `buffer_filter` chooses among them: the function of `--buffer-filter-path`, `pop_first` by default, or a method of a
    subclass. The samples are not saved: after a restart, prompts that waited here come again only in the next epoch.
    """

    def __init__(self, *dataset_and_args: Any) -> None:
        super().__init__(*dataset_and_args)
        self.buffer: list[Any] = []
        self._filter = pop_first
        path = getattr(self.args, "buffer_filter_path", None)
        if path:
            from slime.types.plugins import load_plugin

            self._filter = load_plugin(path, flag=FLAG)

    def buffer_filter(self, args: Any, buffer: list[Any], num_samples: int) -> list[Any]:
        return self._filter(args, None, buffer, num_samples)

    def get_samples(self, num_samples: int) -> list[Any]:
        found = self._from_buffer(num_samples)
        return found + super().get_samples(num_samples - len(found))

    def _from_buffer(self, num_samples: int) -> list[Any]:
        if not self.buffer or num_samples <= 0:
            return []
        chosen = list(self.buffer_filter(self.args, self.buffer, num_samples))
        # A filter that does not remove its choice from the buffer must not return it twice.
        taken = set(map(id, chosen))
        self.buffer[:] = [entry for entry in self.buffer if id(entry) not in taken]
        return chosen

    def add_samples(self, samples: list[Any]) -> None:
        """Keeps samples or groups for `get_samples`. Raises InvalidField for groups of another size than
        `args.n_samples_per_prompt`."""
        if not self.flat:
            for position, group in enumerate(samples):
                if not isinstance(group, list):
                    raise InvalidField(f"samples[{position}]", type(group).__name__, "a group: a list of Samples")
                if len(group) != self.group_size:
                    raise InvalidField(f"samples[{position}]", len(group), f"{self.group_size} samples")
        self.buffer.extend(samples)

    def get_buffer_length(self) -> int:
        return len(self.buffer)


def _read(args: Any) -> Dataset | None:
    if not getattr(args, "rollout_global_dataset", True):
        return None
    path = getattr(args, "prompt_data", None)
    if not path:
        raise InvalidSetting.required("--prompt-data", "or give --disable-rollout-global-dataset")
    columns = Columns(
        input=getattr(args, "input_key", "input"),
        label=getattr(args, "label_key", None),
        metadata=getattr(args, "metadata_key", "metadata"),
        tools=getattr(args, "tool_key", "tools"),
        images=(getattr(args, "multimodal_keys", None) or {}).get(IMAGE),
    )
    shuffle, seed = getattr(args, "rollout_shuffle", False), getattr(args, "rollout_seed", 42)
    return read_dataset(path, columns, shuffle=shuffle, seed=seed)


class PromptSequence:
    """The dataset of a flat source: `sample(n)` returns the next n prompts, without labels.

    `fill_labels` sets the labels of samples that a source made from these prompts.
    """

    def __init__(self, prompts: Dataset | None) -> None:
        self.prompts = prompts
        self._cursor = Cursor()
        # By the identity of the prompt, which the dataset keeps alive: two rows may have equal prompts.
        self._taken: dict[int, Prompt] = {}

    def sample(self, num_samples: int) -> list[Any]:
        if self.prompts is None:
            return [""] * num_samples
        taken, self._cursor = self.prompts.take(self._cursor, num_samples)
        self._taken.update((id(prompt.prompt), prompt) for prompt in taken)
        return [prompt.prompt for prompt in taken]

    def fill_labels(self, samples: Iterable[Sample]) -> None:
        """Sets the row's label and metadata in samples that hold its prompt (the same object) and have none."""
        for sample in samples:
            row = self._taken.get(id(sample.prompt))
            if row is None:
                continue
            if sample.label is None:
                sample.label = copy.deepcopy(row.label)
            if not sample.metadata:
                sample.metadata = copy.deepcopy(row.metadata)

    def __len__(self) -> int:
        return len(self.prompts or ())


def _sequence(dataset: Any) -> Dataset | None:
    if isinstance(dataset, PromptSequence):
        return dataset.prompts
    if hasattr(dataset, "sample"):
        return None
    return Dataset(list(dataset))


def _sample(prompt: Any) -> Sample:
    if isinstance(prompt, Prompt):
        return prompt.to_sample()
    return copy.deepcopy(prompt) if isinstance(prompt, Sample) else Sample(prompt=prompt)
