"""Evaluation sets: read from files once at the start, extended by clients, never leased."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slime.buffer.groups.samples import expand
from slime.buffer.settings import BufferSettings
from slime.buffer.sources.base import Columns
from slime.buffer.sources.dataset import read_dataset
from slime.buffer.store.base import Store
from slime.types.codec import encode_sample
from slime.types.errors import NotFound
from slime.types.models.vision import IMAGE
from slime.v1 import sample_pb2


class EvaluationSets:
    """Evaluation sets by name: the prompts of a set's file, then those that clients added.

    Group and sample indexes count from 0 in each set.
    """

    def __init__(self, store: Store, templates: Mapping[str, list[bytes]], samples_per_prompt: int) -> None:
        self.store = store
        self.templates = templates
        self.samples_per_prompt = samples_per_prompt

    def names(self) -> list[str]:
        return list(dict.fromkeys([*self.templates, *self.store.evaluation_datasets()]))

    def rows_of_file(self, name: str) -> int:
        return len(self.templates.get(name, ()))

    def read(self, name: str) -> Iterator[sample_pb2.SampleGroup]:
        """Raises NotFound naming the known sets."""
        templates = [*self.templates.get(name, []), *self.store.evaluation_prompts(name)]
        if not templates:
            known = ", ".join(self.names()) or "none"
            raise NotFound(
                f"no evaluation set {name!r}; known ones are {known}", field="name", value=name, expected=known
            )
        return self._groups(name, templates)

    def _groups(self, name: str, templates: list[bytes]) -> Iterator[sample_pb2.SampleGroup]:
        count = self.samples_per_prompt
        for position, template in enumerate(templates):
            samples = expand(template, position, range(position * count, (position + 1) * count))
            yield sample_pb2.SampleGroup(group_index=position, dataset=name, samples=samples)


def read_evaluation_files(settings: BufferSettings) -> dict[str, list[bytes]]:
    """Returns templates by the name of their set. Raises what `read_dataset` raises."""
    common = {
        "input_key": settings.eval_input_key or settings.input_key,
        "label_key": settings.eval_label_key or settings.label_key,
        "metadata_key": settings.metadata_key,
        "tool_key": settings.eval_tool_key or settings.tool_key,
        "multimodal_keys": settings.multimodal_keys,
    }

    def columns(name: str) -> Columns:
        set_columns = common | settings.eval_columns.get(name, {})
        return Columns(
            set_columns["input_key"],
            set_columns["label_key"],
            set_columns["metadata_key"],
            set_columns["tool_key"],
            set_columns["multimodal_keys"].get(IMAGE),
        )

    def templates(name: str, path: str) -> list[bytes]:
        dataset = read_dataset(path, columns(name), all_columns=False, flag=f"--eval-prompt-data {name}")
        return [encode_sample(prompt.to_sample()) for prompt in dataset.prompts]

    return {name: templates(name, path) for name, path in settings.evaluation_sets().items()}
