"""One parallel layout, refused in one wording by the checks of a run, the dry run, the trainer and the converters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher_machines import write_rows, write_tokenizer

from slime.converters.convert import hf_to_torch_dist
from slime.converters.megatron.args import model_args, read_model_config
from slime.converters.megatron.model_scripts import model_config
from slime.launcher.config import run_config
from slime.launcher.plan.run_plan import Hardware, make_plan
from slime.trainer.backends.megatron.model import parallel
from slime.types.errors import InvalidSetting

MODEL = model_config("qwen3-0.6B") | {"num_hidden_layers": 30, "hidden_size": 64, "vocab_size": 128}


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("layout")
    (directory / "config.json").write_text(json.dumps(MODEL))
    write_tokenizer(directory)
    rows = write_rows(directory / "prompts.jsonl")
    return ["--hf-checkpoint", str(directory), "--prompt-data", str(rows), "--num-rollout", "1", "--rm-type", "math",
            "--label-key", "label",
            "--n-samples-per-prompt", "2", "--train-backend", "megatron",
            "--output-dir", str(directory / "out")]  # fmt: skip


@pytest.mark.parametrize(
    "layout, message",
    [
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4",
            "--num-layers-per-virtual-pipeline-stage must be a divisor of the 15 layers of a pipeline stage, got 4",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 2",
            "--num-virtual-stages-per-pipeline-rank 2 requires --pipeline-model-parallel-size 2 or more",
        ),
    ],
)
def test_virtual_stages_are_checked_before_a_run(flags: list[str], layout: str, message: str) -> None:
    with pytest.raises(InvalidSetting) as raised:
        run_config.parse([*flags, "--actor-num-gpus-per-node", "2", *layout.split()])
    assert str(raised.value) == message


def refusal(call: Callable[[], object]) -> str | None:
    try:
        call()
    except InvalidSetting as error:
        return str(error)
    return None


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.sampled_from([1, 2, 4, 6, 8]),
    sizes=st.fixed_dictionaries(
        {},
        optional={
            "tensor_model_parallel_size": st.sampled_from([1, 2, 3]),
            "pipeline_model_parallel_size": st.sampled_from([1, 2, 4]),
            "num_layers_per_virtual_pipeline_stage": st.sampled_from([3, 4, 5]),
            "num_virtual_stages_per_pipeline_rank": st.sampled_from([2, 3]),
            "decoder_last_pipeline_num_layers": st.sampled_from([3, 8]),
        },
    ),
)
def test_all_callers_refuse_a_layout_in_the_same_words(flags: list[str], ranks: int, sizes: dict[str, Any]) -> None:
    if len({"num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"} & set(sizes)) == 2:
        return  # a conflict between flags, refused where they are read
    words = [word for name, size in sizes.items() for word in (f"--{name.replace('_', '-')}", str(size))]
    line = [*flags, "--actor-num-gpus-per-node", str(ranks), *words]
    config = Path(flags[1])
    args = model_args(read_model_config(config), sizes)

    checked = refusal(lambda: run_config.parse(line))
    hardware = Hardware(tuple(map(str, range(16))), None, "16 GPUs", assumed=True)
    planned = refusal(lambda: make_plan(run_config.parse(line, check=False), hardware))
    assert planned == checked
    if checked is None:
        return
    assert checked == refusal(lambda: parallel.initialize(args, SimpleNamespace(world_size=ranks)))  # type: ignore[arg-type]
    converted = refusal(lambda: hf_to_torch_dist.read_model(config, sizes, None))
    assert converted == checked or "must be a multiple of" in checked, "a conversion has any number of ranks"
