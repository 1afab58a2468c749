"""Qwen3-VL with Megatron: the numbers of transformers sample by sample, and of fsdp in every layout of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_megatron_ranks import PP, SP, TP, VIRTUAL, numbers, samples_of
from trainer_megatron_ranks import VISION_CASES as CASES
from trainer_processes import run_ranks
from trainer_tiny import Runner, alone, make_samples, make_settings
from trainer_tiny_vision import IMAGE, make_image_samples, write_vision_model

from slime.converters.convert import hf_to_torch_dist, torch_dist_to_hf
from slime.converters.megatron.rank_layout import check_images, sizes_of
from slime.trainer.backends.build import build_backend, open_checkpoints
from slime.trainer.batching.packing import pack
from slime.trainer.checkpoints.checkpoint import TrainerState, read_state
from slime.trainer.trainer import pick_device
from slime.types.errors import InvalidField, InvalidSetting, NotAvailable
from slime.types.models.vision import FAMILIES

KIND = "qwen3_vl"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    write_vision_model(directory / "untied", KIND, layers=4)
    write_vision_model(directory / "tied", KIND, seed=1, layers=4, tied=True)
    return directory


def megatron(path: Path, arguments: dict[str, Any] | None = None, **values: Any) -> Runner:
    return Runner(make_settings(str(path), train_backend="megatron", **values), megatron=arguments)


def plain_model(path: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()


def of_transformers(model: Any, sample: Any) -> torch.Tensor:
    """[R] float64 of one sample."""
    tokens, inputs = torch.tensor(sample.tokens)[None], {}
    if sample.multimodal_train_inputs:
        joined = FAMILIES[KIND].join([sample.multimodal_train_inputs])
        inputs = {name: torch.from_numpy(array) for name, array in joined.items()}
    logits = model(input_ids=tokens, mm_token_type_ids=(tokens == IMAGE).int(), **inputs).logits[0]
    own = tokens[0, -sample.response_length :]
    return logits[-sample.response_length - 1 : -1].log_softmax(-1).gather(-1, own[:, None])[:, 0]


@pytest.mark.parametrize("arguments", [{}, {"recompute_granularity": "full", "recompute_method": "uniform",
                                            "recompute_num_layers": 1}], ids=["plain", "recompute"])  # fmt: skip
@pytest.mark.parametrize("share_prompts", [True, False])
def test_log_probs_and_gradients_are_those_of_transformers_in_float64(
    models: Path, arguments: dict[str, Any], share_prompts: bool
):
    samples, model = make_image_samples(KIND), plain_model(models / "untied")
    backend = megatron(models / "untied", arguments).backend
    assert backend.can_share_prompts
    count = len(samples)
    row = pack(samples, range(count), [0.0] * count, [1.0] * count, vision=backend.vision, share_prompts=share_prompts)
    (found,) = backend.log_probs([row])
    wanted = torch.cat([of_transformers(model, sample) for sample in samples])
    torch.testing.assert_close(found.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    weights = torch.linspace(0.5, 2.0, len(wanted))
    backend.forward_backward([row], lambda number, batch, outputs: (weights * outputs.log_probs).sum())
    (weights.double() * wanted).sum().backward()
    gradients = dict(backend.named_gradients())
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        # A bias of all keys changes no attention.
        assert (gradient - expected[name]).norm() <= 1e-4 * expected[name].norm() + 1e-5, name
        assert expected[name].norm() > 0


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, models: Path) -> dict[int, Path]:
    directories = {size: tmp_path_factory.mktemp(f"ranks{size}") for size in CASES}
    for size, directory in directories.items():
        run_ranks("trainer_megatron_ranks.py", size, directory, str(models), "vision")
    return directories


@pytest.fixture(scope="module")
def expected(models: Path) -> Any:
    known: dict[str, Any] = {}

    def of(model: str, values: dict[str, Any]) -> Any:
        key = json.dumps([model, values])
        if key not in known:
            runner = Runner(make_settings(str(models / model), max_tokens_per_gpu=60, **values))
            found = numbers(runner)
            gradients = {name: p.grad.clone() for name, p in runner.backend.policy.named_parameters()}
            runner.backend._optimizer.clear_gradients()
            found["step"] = runner.run(0, samples_of(runner))
            known[key] = found, gradients, runner.weights()
        return known[key]

    return of


ALL = [(size, case) for size, cases in CASES.items() for case in cases]


@pytest.mark.parametrize(("world_size", "case"), ALL, ids=[case for _, case in ALL])
def test_layouts_of_a_model_that_reads_images_equal_one_rank_of_fsdp(
    results: dict[int, Path], expected: Any, world_size: int, case: str
):
    directory = results[world_size]
    errors = [path.read_text() for path in sorted(directory.glob(f"{case}-*.error"))]
    assert not errors, errors[0][-3000:]
    model, arguments, values = CASES[world_size][case]
    found, gradients, weights = expected(model, values)
    got = json.loads((directory / f"{case}.json").read_text())
    assert got["loss"] == pytest.approx(found["loss"], rel=1e-5)
    for position, values_ in found.items():
        if position.isdigit():
            assert got[position] == pytest.approx(values_, abs=2e-5), position
    for name in ("train/grad_norm", "train/entropy_loss"):
        assert got["step"][name] == pytest.approx(found["step"][name], rel=1e-4), name
    of_layout = load_file(directory / f"{case}-gradients.safetensors")
    assert of_layout.keys() == gradients.keys()
    # A distributed optimizer leaves each rank a part of the summed gradient: there the norm and the step tell.
    for name, gradient in gradients.items() if "use_distributed_optimizer" not in arguments else ():
        assert (of_layout[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-5, name
    updated = load_file(directory / f"{case}.safetensors")
    for name, weight in weights.items():
        # Adam makes a step of any gradient, noise as well.
        assert ((updated[name] - weight).abs() > 2e-4).float().mean() < 0.02, name


def test_a_checkpoint_is_resumed_with_what_sees_and_converted_both_ways(models: Path, tmp_path: Path):
    first = megatron(models / "untied")
    first.run(0, make_image_samples(KIND))
    checkpoints = open_checkpoints(first.settings, first.backend, alone(), models / "untied")
    checkpoints.save(tmp_path / "saved", TrainerState(step=1, updates=first.backend.updates), optimizer=True)
    checkpoints.finish(wait=True)
    wanted = first.weights()
    exported = torch_dist_to_hf.convert(tmp_path / "saved", tmp_path / "hf")
    tensors = load_file(Path(exported) / "model.safetensors")
    assert tensors.keys() == load_file(models / "untied" / "model.safetensors").keys()
    assert all(torch.equal(tensors[name], wanted[name]) for name in tensors)
    first.run(1, make_image_samples(KIND))
    settings = make_settings(str(models / "untied"), train_backend="megatron", load=str(tmp_path / "saved"))
    second = Runner(settings, weights=settings.load)
    open_checkpoints(settings, second.backend, alone(), models / "untied").load(
        settings.load, read_state(settings.load)
    )
    second.run(1, make_image_samples(KIND))
    for name, weight in second.weights().items():
        assert torch.equal(weight, first.weights()[name]), name
    converted = hf_to_torch_dist.convert(tmp_path / "hf", tmp_path / "converted")
    backend = build_backend(settings, alone(), pick_device(0), weights=str(converted))
    for name, tensor in backend.named_weights():
        assert torch.equal(tensor.cpu(), wanted[name]), name


def test_frequencies_of_image_positions_stay_float32_in_bfloat16(models: Path):
    backend = megatron(models / "untied", bf16=True).backend
    tower = backend.models[0].visual.tower
    assert tower.pos_embed.weight.dtype == torch.bfloat16
    wanted = plain_model(models / "untied").model.visual.float().rotary_pos_emb.inv_freq
    assert torch.equal(tower.rotary_pos_emb.inv_freq, wanted)


def test_a_frozen_tower_stays_and_text_alone_trains(models: Path):
    runner = megatron(models / "untied", freeze_params_name_list=["^visual"])
    before = runner.weights()
    runner.run(0, make_image_samples(KIND))
    moved = {name for name, weight in runner.weights().items() if not torch.equal(weight, before[name])}
    assert moved == {name for name in before if ".visual." not in name}
    samples = make_samples()
    for sample in samples:
        sample.tokens = [3 if token == IMAGE else token for token in sample.tokens]
    assert megatron(models / "untied").run(0, samples)["train/grad_norm"] > 0


def test_images_of_another_number_of_tokens_are_refused_by_megatron(models: Path):
    samples, backend = make_image_samples(KIND), megatron(models / "untied").backend
    samples[0].multimodal_train_inputs = samples[2].multimodal_train_inputs
    with pytest.raises(InvalidField, match="images of 8 tokens, expected 4, as in the prompts"):
        backend.log_probs([pack(samples[:1], [0], [0.0], [0.0], vision=backend.vision)])


def test_cuts_that_part_layers_from_images_are_refused_before_anything_is_loaded(models: Path):
    config = json.loads((models / "untied" / "config.json").read_text())
    layers = {"num_layers": 4, TP: 1, SP: False}
    for cut in (VIRTUAL, {PP: 4}, {PP: 2, "decoder_first_pipeline_num_layers": 1}):
        args = layers | cut
        with pytest.raises(InvalidSetting, match="stage has 1 layer, and the first 2 layers of a qwen3_vl"):
            check_images(args, config, sizes_of(args, cut[PP]), own_model=False)
    with pytest.raises(NotAvailable, match="--custom-model-provider-path with a qwen3_vl is not supported yet"):
        check_images(layers, config, sizes_of(layers, 1), own_model=True)
