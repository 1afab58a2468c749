"""Top-p and top-k with a real SGLang engine: the trainer's log-probs are over the tokens that SGLang drew from.

    pytest tests/gpu/runs/test_sglang_nuclei.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_needs import needs, train_on_words, write_qwen3, write_words

NUM_GPUS = 1
WORDS = 2048
pytestmark = needs(NUM_GPUS, "sglang")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("qwen3")
    write_qwen3(
        path, vocab_size=WORDS, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, initializer_range=0.05, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    write_words(path, WORDS)
    return str(path)


@pytest.mark.parametrize("stream_interval", [0, 8])
def test_log_probs_of_a_run_are_over_the_nuclei(model: str, tmp_path: Path, stream_interval: int) -> None:
    nuclei = {"rollout_top_p": 0.7, "rollout_top_k": 64, "rollout_stream_interval": stream_interval}
    for step in train_on_words(tmp_path, model, WORDS, **nuclei):
        # Over the whole vocabulary they would be smaller by -log(0.7) = 0.36 at least.
        assert step["train/train_rollout_logprob_abs_diff"] < 0.1
