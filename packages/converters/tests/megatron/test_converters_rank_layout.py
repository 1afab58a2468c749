"""The parallel layout of Megatron's ranks: megatron-core builds what is accepted; refusals name the flag."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.converters.megatron.rank_layout import (
    EXPERT,
    EXPERT_TENSOR,
    FIRST,
    LAST,
    LAYERS_PER_VIRTUAL,
    PIPELINE,
    PLACEHOLDERS,
    TENSOR,
    VIRTUAL,
    check_model_split,
    layers_of_stages,
    ranks_needed,
    sizes_of,
    virtual_stages,
)
from slime.types.errors import InvalidSetting

MODEL = {"num_layers": 4, "num_attention_heads": 4, "hidden_size": 32}


@pytest.mark.parametrize(
    "sizes, ranks",
    [
        ({}, 1),
        ({TENSOR: 2, PIPELINE: 3, "context_parallel_size": 2}, 12),
        ({EXPERT: 4}, 4),
        ({TENSOR: 2, EXPERT: 2}, 4),
        ({TENSOR: 2, EXPERT: 2, EXPERT_TENSOR: 1}, 2),
        ({"context_parallel_size": 4, EXPERT: 2}, 4),
    ],
)
def test_as_many_ranks_as_the_parallel_sizes_need(sizes: dict[str, Any], ranks: int) -> None:
    assert ranks_needed(sizes) == ranks


def test_virtual_stages() -> None:
    pipeline = MODEL | {PIPELINE: 2}
    assert virtual_stages(pipeline) == 1
    assert virtual_stages(pipeline | {VIRTUAL: 2}) == 2
    assert virtual_stages(pipeline | {LAYERS_PER_VIRTUAL: 1}) == 2
    assert virtual_stages(pipeline | {LAYERS_PER_VIRTUAL: 2}) == 1


@pytest.mark.parametrize(
    "ranks, changes, message",
    [
        (
            6,
            {TENSOR: 2, PIPELINE: 2},
            "--actor-num-nodes x --actor-num-gpus-per-node must be a multiple of "
            "--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 2 = 4, got 6",
        ),
        (
            4,
            {"context_parallel_size": 3},
            "--actor-num-nodes x --actor-num-gpus-per-node must be a multiple of --context-parallel-size 3, got 4",
        ),
        (2, {EXPERT: 2}, "--expert-model-parallel-size 2 requires a model with experts"),
        (
            3,
            {"num_experts": 4, EXPERT: 3},
            "--expert-model-parallel-size must be a divisor of the model's 4 experts, got 3",
        ),
        (
            2,
            {"num_experts": 4, EXPERT: 4},
            "--actor-num-nodes x --actor-num-gpus-per-node must be a multiple of --expert-model-parallel-size 4, got 2",
        ),
        (
            3,
            {PIPELINE: 3},
            "--pipeline-model-parallel-size must be a divisor of the model's 4 layers, got 3: "
            "see --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers",
        ),
        (
            2,
            {"num_layers": 47, PIPELINE: 2},
            "--pipeline-model-parallel-size must be a divisor of the model's 47 layers, got 2: "
            "--decoder-last-pipeline-num-layers 23 leaves 24 layers for each of the others",
        ),
        (2, {PIPELINE: 2, FIRST: 5}, "--decoder-first-pipeline-num-layers 5 of 4 layers: the other 1 pipeline stages "),
        (
            1,
            {VIRTUAL: 2},
            "--num-virtual-stages-per-pipeline-rank 2 requires --pipeline-model-parallel-size 2 or more",
        ),
        (
            2,
            {"num_layers": 30, PIPELINE: 2, LAYERS_PER_VIRTUAL: 4},
            "--num-layers-per-virtual-pipeline-stage must be a divisor of the 15 layers of a pipeline stage, got 4",
        ),
        (
            2,
            {PIPELINE: 2, LAYERS_PER_VIRTUAL: 1, VIRTUAL: 2},
            "--num-layers-per-virtual-pipeline-stage 1 and --num-virtual-stages-per-pipeline-rank 2 cannot be used",
        ),
    ],
)
def test_a_layout_that_does_not_divide_is_refused_with_its_sizes(
    ranks: int, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidSetting) as raised:
        sizes_of(MODEL | changes, ranks)
    assert str(raised.value).startswith(message)


def some(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), values)


LAYOUTS = st.fixed_dictionaries(
    {
        "num_layers": st.integers(1, 12),
        "num_attention_heads": st.just(4),
        PIPELINE: st.integers(1, 4),
        FIRST: some(st.integers(1, 4)),
        LAST: some(st.integers(1, 4)),
        LAYERS_PER_VIRTUAL: some(st.integers(1, 3)),
        VIRTUAL: some(st.integers(1, 3)),
        **dict.fromkeys(PLACEHOLDERS, st.booleans()),
    }
)


@settings(max_examples=300, deadline=None)
@given(LAYOUTS)
def test_each_stage_has_the_layers_that_megatron_core_builds(args: dict[str, Any]) -> None:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

    if any(args[name] for name in PLACEHOLDERS) and (args[FIRST] or args[LAST]):
        return  # a conflict between flags, refused where flags are read
    try:
        sizes = sizes_of(args, args[PIPELINE])
    except InvalidSetting as error:
        assert error.field.startswith("--") and "must be" in str(error) or error.expected
        return
    virtual = sizes.virtual if sizes.virtual > 1 else None
    config = TransformerConfig(
        num_layers=args["num_layers"], hidden_size=32, num_attention_heads=4, pipeline_dtype=float,
        pipeline_model_parallel_size=sizes.pipeline, virtual_pipeline_model_parallel_size=virtual,
        num_layers_in_first_pipeline_stage=args[FIRST], num_layers_in_last_pipeline_stage=args[LAST],
        account_for_embedding_in_pipeline_split=args[PLACEHOLDERS[0]],
        account_for_loss_in_pipeline_split=args[PLACEHOLDERS[1]],
    )  # fmt: skip
    layers = layers_of_stages(args, sizes)
    assert [[len(chunk) for chunk in stage] for stage in layers] == [
        [get_num_layers_to_build(config, chunk if virtual else None, stage) for chunk in range(sizes.virtual)]
        for stage in range(sizes.pipeline)
    ]
    assert sorted(layer for stage in layers for chunk in stage for layer in chunk) == list(range(args["num_layers"]))


def test_uneven_stages_are_set_by_hand() -> None:
    args = MODEL | {PIPELINE: 2, FIRST: 1}
    check_model_split(args)
    assert layers_of_stages(args, sizes_of(args, 2)) == [[[0]], [[1, 2, 3]]]
