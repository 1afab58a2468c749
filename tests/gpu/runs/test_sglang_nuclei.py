"""Top-p and top-k with a real SGLang engine: the trainer's log-probs are over the tokens that SGLang drew from.

    pytest tests/gpu/runs/test_sglang_nuclei.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_needs import needs, train_on_words, write_words_qwen3

NUM_GPUS = 1
WORDS = 2048
pytestmark = needs(NUM_GPUS, "sglang")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_words_qwen3(tmp_path_factory.mktemp("qwen3"), WORDS)


@pytest.mark.parametrize("stream_interval", [0, 8])
def test_log_probs_of_a_run_are_over_the_nuclei(model: str, tmp_path: Path, stream_interval: int) -> None:
    nuclei = {"rollout_top_p": 0.7, "rollout_top_k": 64, "rollout_stream_interval": stream_interval}
    for step in train_on_words(tmp_path, model, WORDS, **nuclei):
        # Over the whole vocabulary they would be smaller by -log(0.7) = 0.36 at least.
        assert step["train/train_rollout_logprob_abs_diff"] < 0.1
