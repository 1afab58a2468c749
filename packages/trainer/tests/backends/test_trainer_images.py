"""Rows with images: the numbers of transformers, sample by sample, and gradients for what sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from trainer_processes import run_ranks
from trainer_tiny import Runner, make_samples, prefixes_of
from trainer_tiny import make_settings as settings_of
from trainer_tiny_vision import GRIDS, IMAGE, make_image_samples, write_vision_model

from slime.trainer.batching.packing import pack
from slime.trainer.checkpoints import checkpoint
from slime.trainer.settings.trainer import TrainerSettings
from slime.types import Sample
from slime.types.errors import InvalidField, NotAvailable
from slime.types.models.vision import FAMILIES

SCRIPT = str(Path(__file__).with_name("trainer_vision_ranks.py"))


def make_settings(model: str, **values: Any) -> TrainerSettings:
    # Only a Qwen3.5 can do without what sees.
    return settings_of(model, train_vision=True, **values)


@pytest.fixture(scope="module", params=["llava", "idefics3", *GRIDS])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def directory(kind: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_vision_model(tmp_path_factory.mktemp("model"), kind)


def expected(directory: str, kind: str, sample: Sample) -> torch.Tensor:
    """[R] by transformers, of one sample."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    inputs: dict[str, Any] = {}
    if sample.multimodal_train_inputs:
        joined = FAMILIES[kind].join([sample.multimodal_train_inputs])
        inputs = {name: torch.from_numpy(array) for name, array in joined.items()}
    tokens = torch.tensor(sample.tokens)[None]
    if kind in GRIDS:
        inputs["mm_token_type_ids"] = (tokens == IMAGE).int()
    with torch.no_grad():
        logits = model(input_ids=tokens, **inputs).logits[0]
    own = tokens[0, -sample.response_length :]
    return logits[-sample.response_length - 1 : -1].log_softmax(-1).gather(-1, own[:, None])[:, 0]


def scores(runner: Runner, kind: str, samples: list[Sample], **options: Any) -> list[torch.Tensor]:
    zeros = [0.0] * len(samples)
    options = {"share_prompts": runner.backend.can_share_prompts} | options
    row = pack(samples, range(len(samples)), zeros, zeros, vision=runner.backend.vision, **options)
    (found,) = runner.backend.scores([row])
    assert found is not None
    return list(found.log_probs.split(row.lengths))


@pytest.mark.parametrize("share_prompts", [True, False])
def test_a_row_of_samples_has_the_log_probs_of_each_alone(directory: str, kind: str, share_prompts: bool) -> None:
    runner, samples = Runner(make_settings(directory)), make_image_samples(kind)
    # A state that goes from token to token belongs to one sample.
    assert runner.backend.can_share_prompts == (kind != "qwen3_5")
    share_prompts &= runner.backend.can_share_prompts
    found = scores(runner, kind, samples, share_prompts=share_prompts)
    for sample, log_probs in zip(samples, found, strict=True):
        torch.testing.assert_close(log_probs, expected(directory, kind, sample), atol=3e-5, rtol=0)
    # Equal tokens, other images.
    assert not torch.allclose(found[0], expected(directory, kind, _with_images_of(samples[0], samples[4])), atol=1e-3)


def test_features_that_transformers_has_not_split_by_image_are_the_same(tmp_path: Path) -> None:
    runner = Runner(make_settings(write_vision_model(tmp_path, "qwen3_vl")))
    samples, model = make_image_samples("qwen3_vl"), runner.backend.policy  # type: ignore[attr-defined]
    split, plain = scores(runner, "qwen3_vl", samples), model.get_image_features

    def whole(**images: torch.Tensor) -> Any:
        features = plain(**images)
        features.deepstack_features = [torch.cat(each) for each in features.deepstack_features]
        return features

    model.get_image_features = whole
    for one, other in zip(scores(runner, "qwen3_vl", samples), split, strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)


def test_turns_behind_images_are_laid_out_once(directory: str, kind: str) -> None:
    samples, shared = make_image_samples(kind)[:2], 3
    for sample, last in zip(samples, (9, 11), strict=True):
        # The model wrote the token of an image, and a tool the one after it: these are text.
        sample.tokens[-4:] = [4, IMAGE, 10, last]
        sample.loss_mask = [1, 1, 0, 1]
    runner = Runner(make_settings(directory))
    trunks = prefixes_of(samples).trunks([0, 1])
    assert {trunk.tokens for trunk in trunks.values()} == {len(samples[0].tokens) - 4 + shared}
    found = scores(runner, kind, samples, trunks=[trunks[0], trunks[1]])
    apart = scores(runner, kind, samples, share_prompts=False)
    for one, other in zip(found, apart, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    assert found[0][3] != found[1][3]


def test_a_smolvlm_is_an_idefics3(tmp_path: Path) -> None:
    directory = write_vision_model(tmp_path, "smolvlm")
    samples = make_image_samples("smolvlm")[:4]
    found = scores(Runner(make_settings(directory)), "smolvlm", samples)
    for sample, log_probs in zip(samples, found, strict=True):
        torch.testing.assert_close(log_probs, expected(directory, "smolvlm", sample), atol=1e-5, rtol=0)


def _with_images_of(sample: Sample, other: Sample) -> Sample:
    return Sample(tokens=sample.tokens, response_length=4, multimodal_train_inputs=other.multimodal_train_inputs)


def test_an_image_token_that_the_model_wrote_is_text(directory: str, kind: str) -> None:
    runner, samples = Runner(make_settings(directory)), make_image_samples(kind)[:2]
    plain = scores(runner, kind, samples)
    samples[0].tokens[-2] = IMAGE
    written = scores(runner, kind, samples)
    torch.testing.assert_close(written[0][:2], plain[0][:2])
    torch.testing.assert_close(written[1], plain[1])
    assert not torch.allclose(written[0][3], plain[0][3])


def test_a_step_moves_what_sees_and_what_speaks(directory: str, kind: str) -> None:
    runner = Runner(make_settings(directory))
    before = runner.weights()
    metrics = runner.run(0, make_image_samples(kind))
    assert metrics["train/grad_norm"] > 0
    moved = {name for name, weight in runner.weights().items() if not torch.equal(weight, before[name])}
    seeing = {name for name in moved if "vision" in name or "visual" in name}
    assert any("layers.0" in name or "blocks.0" in name for name in seeing)
    assert any("layers.0" in name for name in moved - seeing)


def test_weights_have_the_names_of_the_files_and_a_checkpoint_loads(directory: str, kind: str, tmp_path: Path) -> None:
    runner = Runner(make_settings(directory))
    with safe_open(f"{directory}/model.safetensors", "pt") as file:
        assert set(runner.weights()) == set(file.keys())
    runner.run(0, make_image_samples(kind))
    state = checkpoint.TrainerState(step=0, updates=runner.backend.updates, weight_version=1)
    checkpoint.save_checkpoint(tmp_path / "saved", runner.backend, runner.ranks, state, Path(directory))
    resumed = Runner(make_settings(directory), weights=str(tmp_path / "saved"))
    for name, weight in runner.weights().items():
        assert torch.equal(resumed.weights()[name], weight), name


def test_recomputed_activations_give_the_same_step(directory: str, kind: str) -> None:
    plain, again = Runner(make_settings(directory)), Runner(make_settings(directory, gradient_checkpointing=True))
    samples = make_image_samples(kind)
    assert again.run(0, samples)["train/grad_norm"] == pytest.approx(plain.run(0, samples)["train/grad_norm"], rel=1e-4)


def test_two_ranks_of_which_one_has_text_alone_give_the_step_of_one(directory: str, kind: str, tmp_path: Path) -> None:
    run_ranks(SCRIPT, 2, tmp_path, directory, kind, check=True)
    alone = Runner(make_settings(directory, micro_batch_size=4, use_dynamic_batch_size=False))
    alone.run(0, make_image_samples(kind)[4:])
    found = load_file(tmp_path / "weights.safetensors")
    for name, weight in alone.weights().items():
        # A bias of all keys changes no attention: its gradient is noise, which Adam makes a step of.
        if not name.endswith("k_proj.bias"):
            assert ((found[name] - weight).abs() > 1e-4).float().mean() < 0.02, name


def test_images_of_another_number_of_tokens_are_refused(directory: str, kind: str) -> None:
    samples = make_image_samples(kind)
    samples[0].multimodal_train_inputs = samples[2].multimodal_train_inputs
    with pytest.raises(InvalidField, match="images of 8 tokens, expected 4, as in the prompts"):
        scores(Runner(make_settings(directory)), kind, samples[:1])


def test_images_without_a_model_or_without_their_processor_are_refused(model: str, directory: str, kind: str) -> None:
    samples = make_image_samples(kind)
    with pytest.raises(NotAvailable, match="reads text alone, and sample 0 has images"):
        Runner(make_settings(model)).run(0, samples)
    samples[0].multimodal_train_inputs = None
    with pytest.raises(InvalidField, match="what the processor made of the images"):
        Runner(make_settings(directory)).run(0, samples)


@pytest.mark.parametrize(
    "values",
    [{"use_kl_loss": True, "ref_load": "model"}, {"advantage_estimator": "ppo", "critic_load": "model"}],
    ids=["reference", "critic"],
)
def test_a_model_of_text_beside_one_that_reads_images_is_refused(
    model: str, directory: str, kind: str, values: dict[str, Any]
) -> None:
    values = {name: model if value == "model" else value for name, value in values.items()}
    with pytest.raises(NotAvailable, match="reads text alone, as critic, reference or teacher of a policy that reads"):
        Runner(make_settings(directory, **values)).run(0, make_image_samples(kind))


def test_text_alone_trains_on_a_model_that_reads_images(directory: str, kind: str) -> None:
    samples = make_samples()
    for sample in samples:
        sample.tokens = [3 if token == IMAGE else token for token in sample.tokens]
    assert Runner(make_settings(directory)).run(0, samples)["train/grad_norm"] > 0
