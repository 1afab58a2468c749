"""`slime train --multimodal-keys` with real services: rows with images, an engine and a trainer that see them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import tiny_colours
from slow_cases import slow
from tiny_colours import write_inputs
from tiny_runs import evaluations, finish, metrics

REWARD = tiny_colours.__file__


def train(inputs: Path, output_dir: Path, *flags: str) -> tuple[int, str]:
    words = [
        "--hf-checkpoint", inputs / "model", "--prompt-data", inputs / "train.jsonl", "--input-key", "prompt",
        "--label-key", "label", "--multimodal-keys", '{"image": "images"}', "--custom-rm-path", f"{REWARD}:reward",
        "--rollout-engine", "embedded", "--colocate", "--num-rollout", "3", "--rollout-batch-size", "6",
        "--n-samples-per-prompt", "4", "--rollout-max-response-len", "4", "--lr", "1e-3", "--output-dir", output_dir,
        "--eval-prompt-data", "colours", inputs / "test.jsonl", "--eval-interval", "2",
        "--use-dynamic-batch-size", "--max-tokens-per-gpu", "256",
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "slime.launcher.cli", "train", *map(str, words), *flags],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    output = finish(process)
    return process.returncode, output


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("colours") / "inputs", "llava")


@pytest.mark.parametrize("kind", [pytest.param("llava", marks=slow), "qwen2_5_vl"])
def test_a_run_on_images_trains_what_it_generated(kind: str, tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path / "inputs", kind)
    code, output = train(inputs, tmp_path / "run", "--save", str(tmp_path / "saved"), "--save-interval", "3")
    assert code == 0, output
    rows = metrics(tmp_path / "run")
    steps = [row for row in rows if "train/loss" in row]
    assert len(steps) == 3
    for step in steps:
        assert step["train/train_rollout_logprob_abs_diff"] < 1e-4
    assert all("eval/colours" in row for row in evaluations(tmp_path / "run"))
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor

    (saved,) = [path.parent for path in (tmp_path / "saved").rglob("*processor_config.json")]
    # The processor of a Qwen-VL wants torchvision.
    (AutoProcessor if kind == "llava" else AutoImageProcessor).from_pretrained(saved)
    AutoModelForImageTextToText.from_pretrained(saved)


@pytest.mark.parametrize("kind", [pytest.param("qwen3_vl", marks=slow), "qwen3_5"])
def test_a_run_of_megatron_trains_on_images_what_it_generated_and_saves_it(kind: str, tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path / "inputs", kind)
    saves = ("--save", str(tmp_path / "saved"), "--save-interval", "3", "--save-hf", str(tmp_path / "hf-{rollout_id}"))
    code, output = train(inputs, tmp_path / "run", "--train-backend", "megatron", *saves)
    assert code == 0, output
    steps = [row for row in metrics(tmp_path / "run") if "train/loss" in row]
    assert len(steps) == 3
    for step in steps:
        # Weights that the engine got after each update see what the trainer's do.
        assert step["train/train_rollout_logprob_abs_diff"] < 1e-4
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").is_file()
    from transformers import AutoModelForImageTextToText

    first, (saved,) = inputs / "model", tmp_path.glob("hf-*")
    AutoModelForImageTextToText.from_pretrained(saved)
    before, after = (load_file(directory / "model.safetensors") for directory in (first, saved))
    assert before.keys() == after.keys()
    moved = {name for name, weight in before.items() if not np.array_equal(weight, after[name])}
    assert any(".visual.blocks." in name for name in moved) and any(".language_model." in name for name in moved)


def test_what_cannot_be_is_said_before_anything_starts(inputs: Path, tmp_path: Path) -> None:
    for flags, named in (
        (("--train-backend", "megatron"), "config.json: model_type 'llava' is not supported yet: supported families"),
        (("--multimodal-keys", '{"video": "clips"}'), "--multimodal-keys video is not supported yet"),
        (("--rollout-engine", "sglang"), "SGLang accepts token ids together with images only"),
    ):
        code, output = train(inputs, tmp_path / "never", *flags)
        assert code == 2 and named in output, output
    code, output = train(inputs, tmp_path / "planned", "--dry-run")
    # Weights of the language model and of the vision part.
    assert code == 0 and f"{_parameters(inputs / 'model'):,} parameters" in output, output


def _parameters(directory: Path) -> int:
    with safe_open(directory / "model.safetensors", "np") as file:
        return sum(file.get_tensor(name).size for name in file.keys())  # noqa: SIM118


def test_a_row_that_lacks_an_image_ends_the_run_with_its_line(inputs: Path, tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "<image>a<image>", "images": ["%s"], "label": "red"}\n' % (inputs / "red.png"))
    code, output = train(inputs, tmp_path / "run", "--prompt-data", str(data))
    assert code == 2 and "train.jsonl, line 1: column 'images'" in output, output
    assert '"1 image", expected 2, one for each <image>' in output
