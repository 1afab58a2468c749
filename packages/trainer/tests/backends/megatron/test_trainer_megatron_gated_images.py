"""Qwen3.5 with images, with both backends: the numbers of transformers sample by sample, and in layouts of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_megatron_ranks import GATED_VISION_CASES as CASES
from trainer_megatron_ranks import assert_same_step, of_one_rank, run_layouts, written
from trainer_tiny import Runner, alone, make_samples, make_settings
from trainer_tiny_vision import IMAGE, make_image_samples, write_vision_model

from slime.converters.convert import hf_to_torch_dist, torch_dist_to_hf
from slime.converters.families.qwen_gated import with_vision
from slime.trainer.backends.build import open_checkpoints
from slime.trainer.backends.megatron.vision import rotary_axes
from slime.trainer.batching.packing import pack
from slime.trainer.checkpoints.checkpoint import TrainerState
from slime.types.errors import InvalidFile, NotAvailable
from slime.types.models.vision import FAMILIES

KIND = "qwen3_5"
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    write_vision_model(directory / "images", KIND, layers=4)
    return directory


def run_of(path: Path, backend: str = "megatron", arguments: dict[str, Any] | None = None, **values: Any) -> Runner:
    values = {"train_vision": True} | values
    return Runner(make_settings(str(path), train_backend=backend, **values), megatron=arguments)


@pytest.fixture(scope="module")
def expected(models: Path) -> tuple[list[torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of each sample by transformers, weights of a loss, and its gradients."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(
        models / "images", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    found = []
    for sample in make_image_samples(KIND):
        tokens, inputs = torch.tensor(sample.tokens)[None], {}
        if sample.multimodal_train_inputs:
            joined = FAMILIES[KIND].join([sample.multimodal_train_inputs])
            inputs = {name: torch.from_numpy(array) for name, array in joined.items()}
        logits = model(input_ids=tokens, mm_token_type_ids=(tokens == IMAGE).int(), **inputs).logits[0]
        own = tokens[0, -sample.response_length :]
        found.append(logits[-sample.response_length - 1 : -1].log_softmax(-1).gather(-1, own[:, None])[:, 0])
    weights = torch.linspace(0.5, 2.0, sum(map(len, found)))
    (weights * torch.cat(found)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return [log_probs.detach() for log_probs in found], weights, gradients


@pytest.mark.parametrize(
    ("backend", "arguments", "values"),
    [
        ("megatron", {}, {}),
        ("megatron", RECOMPUTE, {}),
        ("fsdp", {}, {}),
        ("fsdp", {}, {"gradient_checkpointing": True}),
    ],
    ids=["megatron", "megatron-recompute", "fsdp", "fsdp-recompute"],
)
def test_a_row_with_images_has_the_log_probs_and_gradients_of_each_sample_alone(
    models: Path, expected: Any, backend: str, arguments: dict[str, Any], values: dict[str, Any]
):
    wanted, weights, gradients = expected
    runner, samples = run_of(models / "images", backend, arguments, **values), make_image_samples(KIND)
    assert not runner.backend.can_share_prompts and runner.backend.vision is not None
    count = len(samples)
    row = pack(samples, range(count), [0.0] * count, [1.0] * count, vision=runner.backend.vision, share_prompts=False)
    (found,) = runner.backend.log_probs([row])
    # By sample, so that a failure names one.
    for number, (ours, theirs) in enumerate(zip(found.split(row.lengths), wanted, strict=True)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-5, msg=f"sample {number}")
    runner.backend.forward_backward([row], lambda number, batch, outputs: (weights * outputs.log_probs).sum())
    if backend == "megatron":
        of_row = dict(runner.backend.named_gradients())
    else:
        of_row = {name: parameter.grad for name, parameter in runner.backend.policy.named_parameters()}
    assert of_row.keys() == gradients.keys()
    for name, gradient in of_row.items():
        assert (gradient - gradients[name]).norm() <= 2e-4 * gradients[name].norm(), name


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, models: Path) -> dict[int, Path]:
    return run_layouts(tmp_path_factory, models, "gated-vision")


@pytest.fixture(scope="module")
def one_rank(models: Path) -> Any:
    return of_one_rank(models / "images", train_vision=True)


@pytest.mark.parametrize("case", CASES[2])
def test_two_ranks_have_the_numbers_of_one_rank_of_fsdp(results: dict[int, Path], one_rank: Any, case: str):
    assert_same_step(one_rank, written(results[2], case))


def test_what_sees_is_saved_exported_and_converted_both_ways(models: Path, tmp_path: Path):
    first = run_of(models / "images")
    before = first.weights()
    first.run(0, make_image_samples(KIND))
    wanted = first.weights()
    assert before.keys() == load_file(models / "images" / "model.safetensors").keys()
    # Every weight of the vision part moved, and goes to engines by the name that it has in the files.
    assert not [name for name in before if ".visual." in name and torch.equal(before[name], wanted[name])]
    assert not first.backend.untrained_weights()
    checkpoints = open_checkpoints(first.settings, first.backend, alone(), models / "images")
    checkpoints.save(tmp_path / "saved", TrainerState(step=1, updates=first.backend.updates), optimizer=True)
    checkpoints.finish(wait=True)
    exported = load_file(Path(torch_dist_to_hf.convert(tmp_path / "saved", tmp_path / "hf")) / "model.safetensors")
    assert exported.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in exported.items())
    converted = hf_to_torch_dist.convert(tmp_path / "hf", tmp_path / "converted")
    for start in (tmp_path / "saved", converted):
        settings = make_settings(str(models / "images"), train_backend="megatron", train_vision=True, load=str(start))
        for name, weight in Runner(settings, weights=settings.load).weights().items():
            assert torch.equal(weight, wanted[name]), name


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_runs_on_text_leave_what_sees_as_it_is(models: Path, tmp_path: Path, backend: str):
    # Also from a checkpoint that has it.
    start = str(hf_to_torch_dist.convert(models / "images", tmp_path / "converted")) if backend == "megatron" else None
    settings = make_settings(str(models / "images"), train_backend=backend, load=start)
    runner = Runner(settings, weights=start)
    assert runner.backend.vision is None
    samples = make_samples()
    assert runner.run(0, samples)["train/grad_norm"] > 0
    names = load_file(models / "images" / "model.safetensors").keys()
    seeing = {name for name in names if name.startswith("model.visual.")}
    assert runner.weights().keys() == names - seeing and set(runner.backend.untrained_weights()) == seeing
    with pytest.raises(NotAvailable, match="reads text alone, and sample 0 has images"):
        runner.run(1, make_image_samples(KIND))


def test_a_checkpoint_of_a_run_on_text_lacks_what_sees_and_says_so(models: Path, tmp_path: Path):
    text = run_of(models / "images", train_vision=None)
    checkpoints = open_checkpoints(text.settings, text.backend, alone(), models / "images")
    checkpoints.save(tmp_path / "saved", TrainerState(step=1, updates=0), optimizer=False)
    checkpoints.finish(wait=True)
    settings = make_settings(
        str(models / "images"), train_backend="megatron", train_vision=True, load=str(tmp_path / "saved")
    )
    with pytest.raises(InvalidFile, match=r"--load: .* has no tensor visual\.tower\."):
        Runner(settings, weights=settings.load)


def test_channels_turn_with_the_axes_that_the_config_says(models: Path):
    config = json.loads((models / "images" / "config.json").read_text())
    assert rotary_axes(config, 8) == [0, 1, 2, 0] * 2
    # The sections of a published Qwen3.5, which transformers takes too where a config has none.
    del config["text_config"]["rope_parameters"]["mrope_section"]
    axes = rotary_axes(config, 64)
    assert [axes[:32].count(axis) for axis in range(3)] == [11, 11, 10] and axes[:3] == [0, 1, 2]


def test_layers_that_see_images_are_refused(models: Path):
    config = json.loads((models / "images" / "config.json").read_text())
    config["vision_config"]["deepstack_visual_indexes"] = [1]
    with pytest.raises(NotAvailable, match=r"deepstack_visual_indexes \[1\] is not supported yet"):
        with_vision(config)
