"""The numbers of parameters that plans are made with are those of the models: transformers', and Megatron's by rank."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parameter_ranks import LAYOUTS, arguments
from slime.converters.families import find_family, read_config
from slime.converters.megatron.rank_layout import sizes_of
from slime.launcher.plan.parameter_counts import by_transformers, of_stages, whole_model
from tiny_families import NAMES, WITH_TRANSFORMERS, write_tiny

SCRIPT = Path(__file__).with_name("parameter_ranks.py")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("counts") / "models"
    for name in NAMES:
        write_tiny(name, directory / name, layers=4)
    return directory


@pytest.mark.parametrize("name", WITH_TRANSFORMERS)
def test_the_whole_model_has_as_many_as_that_of_transformers(name: str, models: Path) -> None:
    assert whole_model(read_config(models / name)) == by_transformers(models / name)


def test_each_rank_of_megatron_has_as_many_as_planned(models: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(models)], capture_output=True, text=True, env=environment, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    counts: dict[str, Any] = json.loads((models.parent / "counts.json").read_text())
    wrong = []
    for key, ranks in counts.items():
        name, layout, *ahead = key.split()
        config = read_config(models / name)
        args = arguments(config, layout, bool(ahead))
        sizes = sizes_of(args, len(ranks))
        held = of_stages(config, args, sizes)
        for rank, found in enumerate(ranks):
            place = sizes.coordinates(rank)
            planned = {"dense": held[place.pipeline].dense, "experts": held[place.pipeline].experts}
            planned["place"] = {part: getattr(place, part) for part in found["place"]}
            if planned != found:
                wrong.append((key, rank, planned, found))
    assert not wrong
    assert {key.split()[0] for key in counts} == set(NAMES)
    assert {key.split()[1] for key in counts} == set(LAYOUTS)


def test_every_family_is_among_those_compared(models: Path) -> None:
    from slime.converters.families import FAMILIES

    compared = {find_family(read_config(models / name)).name for name in NAMES}
    # The trainer's test_trainer_megatron_vision compares it, and the test below counts it.
    assert compared | {"Qwen3-VL"} == {family.name for family in FAMILIES}


def test_what_reads_images_is_on_the_first_stage(tmp_path: Path) -> None:
    from transformers import Qwen3VLConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    text = {**sizes, "num_hidden_layers": 4, "num_key_value_heads": 2, "vocab_size": 128}
    sees = {"depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
    sees |= {"num_position_embeddings": 9, "patch_size": 4, "deepstack_visual_indexes": [0, 1]}
    Qwen3VLConfig(text_config=text, vision_config=sees).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert whole_model(config) == by_transformers(tmp_path)
    shapes = {p.name: math.prod(p.shape) for p in find_family(config).parameters(config)}
    seeing = sum(size for name, size in shapes.items() if name.startswith("visual."))
    layer = sum(size for name, size in shapes.items() if name.startswith("decoder.layers.0."))
    args = arguments(text | config, "alone", ahead=False) | {"pipeline_model_parallel_size": 2}
    first, last = of_stages(config, args, sizes_of(args, 2))
    assert first.total == seeing + 2 * layer + 128 * 32
    assert last.total == 2 * layer + 32 + 128 * 32
