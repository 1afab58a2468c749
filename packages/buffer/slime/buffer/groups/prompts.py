"""Turns prompts into groups: those of clients at once, those of the dataset when a worker asks for more."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from slime.buffer.sources.base import Prompt
from slime.buffer.sources.dataset import Cursor, Dataset
from slime.buffer.sources.media import Image, images_in_messages
from slime.buffer.store.base import Group, State, Store
from slime.types.codec import encode_sample
from slime.types.errors import InvalidField, InvalidSetting
from slime.types.sample.validate import check_finite
from slime.types.wire.json_fields import from_json
from slime.v1 import buffer_pb2

TRAIN = "train"


class Prompts:
    """Makes groups of `samples_per_prompt` samples; group and sample indexes count up and never repeat."""

    def __init__(self, store: Store, dataset: Dataset | None, samples_per_prompt: int) -> None:
        self.store = store
        self.dataset = dataset
        self.samples_per_prompt = samples_per_prompt
        if dataset is not None:
            self._check_same(dataset)

    def _check_same(self, dataset: Dataset) -> None:
        with self.store.transaction():
            known = self.store.get("dataset")
            if known not in (None, dataset.identity):
                raise InvalidSetting.must_be(
                    "--prompt-data",
                    f"{known}, from which --buffer-dir was filled",
                    got=dataset.identity,
                    reason="its place in the data has no meaning for other prompts; use another --buffer-dir for them",
                )
            self.store.put("dataset", dataset.identity)

    @property
    def cursor(self) -> Cursor:
        return Cursor(*self.store.get("cursor", (0, 0)))

    def add(
        self, templates: Sequence[bytes], *, key: str, dataset: str, evaluation_rows: int = 0
    ) -> tuple[int, int, bool]:
        """Returns (number added, first index, whether `key` was known). Any dataset but "train" is an evaluation set,
        with indexes of its own.

        templates: prompts as `encode_prompt` makes them. evaluation_rows: number of prompts in that set's file.
        Raises InvalidField without prompts, and for a key that other prompts were added under.
        """
        if not templates:
            raise InvalidField("prompts", "none", "at least one prompt")
        dataset = dataset or TRAIN
        digest = _digest(dataset, templates)
        with self.store.transaction():
            known = self.store.prompt_batch(key) if key else None
            if known is not None:
                first, known_digest = known
                if known_digest not in (None, digest):
                    raise InvalidField(
                        "key", key, "a name of its own for each batch: other prompts were added under this one"
                    )
                return 0, first, True
            if dataset == TRAIN:
                first = self.insert(templates)[0].group_index
            else:
                first = evaluation_rows + self.store.insert_evaluation_prompts(dataset, templates)
            if key:
                self.store.insert_prompt_batch(key, len(templates), first, digest)
            return len(templates), first, False

    def draw(self, count: int) -> list[Group]:
        """Returns up to `count` new READY groups from the dataset; none without a dataset. Inside a transaction."""
        if self.dataset is None or count <= 0:
            return []
        prompts, cursor = self.dataset.take(self.cursor, count)
        self.store.put("cursor", (cursor.epoch, cursor.offset))
        return self.insert([encode_prompt(prompt) for prompt in prompts])

    def insert(self, templates: Sequence[bytes], state: State = State.READY) -> list[Group]:
        """Adds groups with the next numbers. Inside a transaction."""
        first_group = self.store.get("next_group_index", 0)
        first_sample = self.store.get("next_sample_index", 0)
        groups = [
            Group(
                group_index=first_group + position,
                dataset=TRAIN,
                state=state,
                template=template,
                first_sample=first_sample + position * self.samples_per_prompt,
                num_samples=self.samples_per_prompt,
            )
            for position, template in enumerate(templates)
        ]
        self.store.insert_groups(groups)
        self.store.put("next_group_index", first_group + len(groups))
        self.store.put("next_sample_index", first_sample + len(groups) * self.samples_per_prompt)
        return groups


def encode_prompt(prompt: Prompt) -> bytes:
    """Encodes the sample that every sample of a group starts as. Raises InvalidFile if an image's file is gone."""
    return encode_sample(prompt.to_sample())


def _digest(dataset: str, templates: Sequence[bytes]) -> str:
    digest = hashlib.sha256(dataset.encode())
    for template in templates:
        digest.update(len(template).to_bytes(8, "little"))
        digest.update(template)
    return digest.hexdigest()


def prompt_of_message(message: buffer_pb2.Prompt, position: int) -> Prompt:
    """Converts a client's prompt. Raises InvalidField naming `prompts[position]` and the field."""
    prompt: str | list[dict[str, Any]]
    images: list[Image] = []
    match message.WhichOneof("prompt"):
        case "text":
            prompt = message.text
        case "messages_json":
            field = f"prompts[{position}].messages_json"
            messages = from_json(message.messages_json, field, list)
            check_finite(field, messages)
            if not messages or not all(isinstance(turn, dict) and "role" in turn for turn in messages):
                raise InvalidField(field, message.messages_json, "chat messages: objects with a role")
            prompt, images = images_in_messages(
                messages, where=field, refuse=lambda value, expected: InvalidField(field, value, expected)
            )
        case _:
            raise InvalidField(f"prompts[{position}].prompt", "nothing", "text or messages_json")
    metadata = {}
    if message.metadata_json:
        metadata = from_json(message.metadata_json, f"prompts[{position}].metadata_json", dict)
        check_finite(f"prompts[{position}].metadata_json", metadata)
    return Prompt(prompt, message.label if message.HasField("label") else None, metadata, images)
