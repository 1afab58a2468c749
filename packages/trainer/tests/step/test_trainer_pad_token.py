"""A token that a model samples trains as any other, whether its config calls it padding or not."""

import numpy as np
import pytest
import torch
from trainer_tiny import VOCAB, Runner, make_settings, write_model

from slime.types import Sample

PAD = 0  # of the tiny model's config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import AutoModelForCausalLM

    path = write_model(tmp_path_factory.mktemp("models") / "model")
    made = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        # transformers starts this row at 0, which a trained model's is not.
        made.get_input_embeddings().weight[PAD].normal_(std=0.3)
    made.save_pretrained(path)
    return path


def padded_samples() -> list[Sample]:
    random = np.random.default_rng(0)
    samples = []
    for i in range(8):
        tokens = random.integers(2, VOCAB, 10).astype(np.int32)
        tokens[[2, 6]] = PAD
        samples.append(
            Sample(
                index=i, group_index=i // 4, tokens=tokens, response_length=6, loss_mask=np.ones(6, np.uint8),
                reward=float(i % 3), rollout_log_probs=np.full(6, -3.0, np.float32),
            )
        )  # fmt: skip
    return samples


def test_both_backends_have_the_same_gradient_where_the_pad_token_is_sampled(model: str):
    def step(backend: str) -> tuple[float, torch.Tensor]:
        runner = Runner(make_settings(model, train_backend=backend))
        norm = runner.run(0, padded_samples())["train/grad_norm"]
        return norm, runner.weights()["model.embed_tokens.weight"][PAD]

    before = Runner(make_settings(model)).weights()["model.embed_tokens.weight"][PAD]
    (norm, row), (expected, expected_row) = step("fsdp"), step("megatron")
    assert norm == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(row, expected_row, rtol=1e-5, atol=1e-6)
    assert not torch.equal(row, before)
