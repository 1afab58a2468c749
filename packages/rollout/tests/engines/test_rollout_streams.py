"""Pieces of streamed answers become the answer, whether each has all tokens so far or the new ones only."""

from __future__ import annotations

import base64
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.rollout.engines.sglang.launch import SGLangOptions, server_command
from slime.rollout.engines.streams import StreamedAnswers, first_tokens, refusal
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.errors import EngineError, InvalidSetting

SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=6)


def encoded(values: Any) -> str:
    return base64.b64encode(np.asarray(values, "<i4").tobytes()).decode()


def answer(first: int, last: int, finished: bool) -> dict[str, Any]:
    """Tokens `first` to `last` of an answer whose token n has the nucleus 0 ... n."""
    nuclei = [list(range(n + 1)) for n in range(first, last)]
    meta = {
        "completion_tokens": last, "finish_reason": {"type": "stop"} if finished else None, "weight_version": "3",
        "output_token_logprobs": [[-float(n), n, None] for n in range(first, last)],
        "top_p_token_ids": encoded(sum(nuclei, [])),
        "top_p_token_offsets": encoded(np.cumsum([0, *map(len, nuclei)])),
    }  # fmt: skip
    text = "".join(chr(97 + n % 26) for n in range(first, last))
    return {"text": text, "output_ids": list(range(first, last)), "meta_info": meta}


def pieces(sizes: list[int], incremental: bool) -> list[dict[str, Any]]:
    ends = [sum(sizes[:count]) for count in range(len(sizes) + 1)]
    steps = list(pairwise(ends))
    return [answer(a if incremental else 0, b, i == len(steps) - 1) for i, (a, b) in enumerate(steps)]


def as_sglang(piece: dict[str, Any]) -> dict[str, Any]:
    """Lists the nuclei as SGLang does, beside log-probs over the whole vocabulary."""
    meta = {name: value for name, value in piece["meta_info"].items() if not name.startswith("top_p")}
    pairs = meta["output_token_logprobs"]
    meta |= {
        "output_token_sampling_mask": [list(range(n + 1)) for _, n, _ in pairs],
        "output_token_sampling_logprobs": [log_prob for log_prob, _, _ in pairs],
        "output_token_sampling_mask_length": len(pairs),
        "output_token_logprobs": [[log_prob - 1, n, None] for log_prob, n, _ in pairs],
    }  # fmt: skip
    return piece | {"meta_info": meta}


@given(SIZES, st.booleans())
def test_nuclei_that_sglang_lists_are_those_of_the_answer(sizes: list[int], incremental: bool) -> None:
    streamed = StreamedAnswers(1)
    for piece in pieces(sizes, incremental):
        streamed.add(as_sglang(piece), "e")
    assert streamed.outputs() == [answer(0, sum(sizes), True)]


def test_nuclei_that_are_not_one_a_token_end_the_request() -> None:
    piece = as_sglang(answer(0, 3, True))
    piece["meta_info"]["output_token_sampling_mask"].pop()
    with pytest.raises(EngineError, match="engine e returns 2 nuclei and 3 log-probs over them for 3 tokens"):
        StreamedAnswers(1).add(piece, "e")


@given(st.lists(st.tuples(SIZES, st.booleans()), min_size=1, max_size=3), st.randoms())
def test_pieces_in_any_order_of_the_prompts_make_the_answers(answers: Any, random: Any) -> None:
    streamed, left = StreamedAnswers(len(answers)), [pieces(*each) for each in answers]
    while any(left):
        assert not streamed.complete
        index = random.choice([i for i, each in enumerate(left) if each])
        streamed.add(left[index].pop(0) | {"index": index}, "e")
    assert streamed.complete
    assert streamed.outputs() == [answer(0, sum(sizes), True) for sizes, _ in answers]


@given(SIZES, st.integers(0, 6), st.booleans())
def test_a_lost_stream_leaves_the_tokens_that_had_arrived(sizes: list[int], arrived: int, incremental: bool) -> None:
    streamed = StreamedAnswers(2)
    for piece in pieces([*sizes, 1], incremental)[: min(arrived, len(sizes))]:
        streamed.add(piece, "e")
    count = sum(sizes[:arrived])
    assert streamed.begun == (count > 0)
    first, second = streamed.kept(["a", "b"], "lost")
    assert first["output_ids"] == list(range(count)) and first["meta_info"]["finish_reason"] == {"type": "lost"}
    assert second["output_ids"] == [] and second["meta_info"]["id"] == "b"
    if count:
        expected = first_tokens(answer(0, count, False), count)
        assert first == expected | {"meta_info": expected["meta_info"] | {"finish_reason": {"type": "lost"}}}
        cut = first_tokens(first, count - 1)["meta_info"]
        assert cut["top_p_token_ids"] == answer(0, count - 1, False)["meta_info"]["top_p_token_ids"]


def test_a_piece_that_is_missing_is_an_error() -> None:
    first, _, last = pieces([2, 3, 1], incremental=True)
    streamed = StreamedAnswers(1)
    streamed.add(first, "e")
    with pytest.raises(EngineError, match="streams 1 of 6 tokens after the first 2"):
        streamed.add(last, "e")
    with pytest.raises(EngineError, match="prompt 1 of 1"):
        streamed.add(first | {"index": 1}, "e")


def test_refusals_arrive_as_pieces_too() -> None:
    assert refusal({"error": {"message": "no", "code": 400}}) == (400, {"message": "no", "code": 400})
    assert refusal({"error": {"message": "no"}}) == (500, {"message": "no"})
    # SGLang's way of refusing a request whose stream has begun, and of ending one that was aborted.
    reason = {"type": "abort", "message": "too long", "status_code": 400}
    assert refusal({"meta_info": {"finish_reason": reason}}) == (400, reason)
    assert refusal({"meta_info": {"finish_reason": reason | {"status_code": None}}}) is None


def test_sglang_streams_increments_where_it_is_asked_to() -> None:
    options = SGLangOptions(model_path="m", gpus=["0"], increments=True)
    assert "--incremental-streaming-output" in server_command(options)
    assert not any("incremental" in word for word in server_command(SGLangOptions(model_path="m", gpus=["0"])))


def test_kept_tokens_and_bits_of_deterministic_runs_exclude_each_other() -> None:
    with pytest.raises(InvalidSetting, match="--rollout-stream-interval 8 and --deterministic cannot be used together"):
        RolloutSettings(hf_checkpoint="m", rm_type="math", deterministic=True, rollout_stream_interval=8)
    RolloutSettings(hf_checkpoint="m", rm_type="math", deterministic=True, rollout_stream_interval=0)
