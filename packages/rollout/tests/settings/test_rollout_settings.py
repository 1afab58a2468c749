"""Settings, the command line, and work on files without a buffer."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rollout_fakes import VOCABULARY, FakeEngine

from slime.rollout.cli import main
from slime.rollout.engines.embedded.__main__ import main as embedded_main
from slime.rollout.engines.registry import choose_engine
from slime.rollout.generate.offline import read_prompts
from slime.rollout.generate.output_file import check_output, write_samples
from slime.rollout.generate.sample import refusal
from slime.rollout.metrics import pass_rates
from slime.rollout.prompts.encoder import PromptEncoder
from slime.rollout.prompts.tokenizer import context_length, load_tokenizer
from slime.rollout.recordings.torch_files import read_torch
from slime.rollout.rewards.registry import reward_function
from slime.rollout.settings.rollout import RolloutSettings
from slime.types import Sample
from slime.types.errors import DeadlineExceeded, InvalidFile, InvalidSetting, MissingFile, NotAvailable, OutOfSpace
from slime.types.settings import build


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rollout_temperature": 0.0}, "--rollout-temperature must be at least 1e-06, got 0"),
        (
            {"over_sampling_batch_size": 8, "rollout_batch_size": 16},
            "at least --rollout-batch-size 16, got 8",
        ),
        ({"mask_offpolicy_in_partial_rollout": True}, "--partial-rollout"),
        (
            {"rollout_max_prompt_len": 9, "rollout_max_context_len": 9},
            "less than --rollout-max-context-len 9, got 9",
        ),
        ({"rm_type": "remote_rm"}, "--rm-url"),
        ({"rollout_top_k": 0}, "--rollout-top-k"),
        ({"rollout_engine_dtype": "float3"}, "did you mean float32"),
        (
            {"colocate": True, "rollout_external_engine_addrs": ["h:1"]},
            "--colocate and --rollout-external-engine-addrs cannot be used together: external engines have no GPU",
        ),
    ],
)
def test_contradictions_are_named(values, message):
    with pytest.raises(InvalidSetting, match=message):
        build(RolloutSettings, {"hf_checkpoint": "x"} | values)


def test_the_context_sets_the_longest_prompt():
    assert RolloutSettings(hf_checkpoint="x", rollout_max_context_len=100).max_prompt_len == 99
    assert RolloutSettings(hf_checkpoint="x").max_prompt_len is None


def test_prompts_to_tokens(checkpoint):
    tokenizer = load_tokenizer(str(checkpoint))
    ids = {c: i for i, c in enumerate(VOCABULARY)}
    plain = PromptEncoder(tokenizer)
    assert plain.encode(Sample(prompt="12>")).tolist() == [ids["1"], ids["2"], ids[">"]]
    messages = Sample(prompt=[{"role": "user", "content": "12"}])
    threads = []
    template = tokenizer.apply_chat_template
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            tokenizer,
            "apply_chat_template",
            lambda *args, **kwargs: threads.append(threading.current_thread()) or template(*args, **kwargs),
        )
        asyncio.run(plain.prepare([messages, Sample(prompt="12>")]))
        assert len(threads) == 1 and threads[0] is not threading.main_thread(), "off the event loop"
        plain.encode(messages)
        assert len(threads) == 1
    assert plain.encode(messages).tolist() == [ids["1"], ids["2"], ids[">"]]
    assert plain.encode(messages) is plain.encode(Sample(prompt=messages.prompt))
    assert PromptEncoder(tokenizer, apply_chat_template=True).encode(Sample(prompt="7")).tolist() == [
        ids["7"],
        ids[">"],
    ]
    assert context_length(str(checkpoint)) == 16


def test_a_directory_without_a_tokenizer(tmp_path):
    with pytest.raises(MissingFile, match="has no tokenizer"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(MissingFile, match="no such directory"):
        load_tokenizer(str(tmp_path / "nothing"))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidFile, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))


def test_pass_rates():
    rates = pass_rates([[1, 0, 0, 0], [0, 0, 0, 0]])
    assert rates == {"pass@1": pytest.approx(0.125), "pass@2": pytest.approx(0.25), "pass@4": pytest.approx(0.5)}
    assert pass_rates([[1.0, 1.0, 0.5]]) == {"pass@1": pytest.approx(2 / 3), "pass@2": 1.0}


def test_chat_messages_of_a_file_need_a_chat_template(checkpoint, tmp_path, capsys):
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": None}))
    prompts = tmp_path / "prompts.jsonl"
    flags = f"--hf-checkpoint {model} --prompts {prompts} --output {tmp_path}/o --rm-type random".split()
    for prompt, more, wants in (
        ([{"role": "user", "content": "12"}], [], f"--prompts {prompts}, with chat messages,"),
        ("12", ["--apply-chat-template"], "--apply-chat-template"),
    ):
        prompts.write_text(json.dumps({"input": prompt}) + "\n")
        assert main(["generate", *flags, *more]) == 2
        assert f"error: {wants} requires a tokenizer with a chat template: --hf-check" in capsys.readouterr().err


def test_generate_from_a_file(checkpoint, tmp_path, capsys):
    engine = FakeEngine()
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "samples.jsonl"
    rows = [{"input": "12>", "label": "21"}, {"input": "34>", "label": "00"}, {"input": "123456789>", "label": "x"}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = f"--hf-checkpoint {checkpoint} --prompts {prompts} --output {output} --rm-type exact_partial"
    flags += (
        f" --n-samples-per-prompt 2 --rollout-max-prompt-len 8 --rollout-external-engine-addrs 127.0.0.1:{engine.port}"
    )
    assert main(["generate", *flags.split()]) == 0
    samples = [json.loads(line) for line in output.read_text().splitlines()]
    assert [s["index"] for s in samples] == [0, 1, 2, 3]
    assert [s["reward"] for s in samples] == [1.0, 1.0, pytest.approx(1 / 6), pytest.approx(1 / 6)]
    assert samples[0]["status"] == "completed" and len(samples[0]["tokens"]) == 6
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["rollout/prompt_too_long"] == 1 and metrics["rollout/response_lengths"] == 3
    engine.stop()


def test_a_broken_line_is_named(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"input": "1"}\n{"input": \n')
    with pytest.raises(InvalidFile, match="line 2"):
        read_prompts(str(file), "input", "label", "metadata")
    with pytest.raises(MissingFile):
        read_prompts(str(tmp_path / "none.jsonl"), "input", "label", "metadata")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serv"], "slime-rollout: error: unknown command 'serv'; did you mean serve?"),
        ([], "slime-rollout: error: a command is required: one of serve, generate, engines; see --help"),
        (["serve", "--hf-checkpoint", "/nowhere/x", "--buffer-address", "127.0.0.1:1"], "no such directory /nowhere/x"),
        (["serve", "--hf-checkpoints", "x"], "did you mean --hf-checkpoint?"),
        (["serve", "--hf-checkpoint", "x"], "--buffer-address is required"),
        (["serve", "--hf-checkpoint", "x", "--buffer-address", "h:99999"], "--buffer-address must be HOST:PORT"),
        (
            ["generate", "--hf-checkpoint", "x", "--prompts", "/nowhere.jsonl", "--output", "o"],
            "no such file /nowhere.jsonl",
        ),
    ],
)
def test_bad_flags_exit_with_2(argv, message, capsys):
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_import_is_light():
    code = "import sys, slime.rollout.service; print(set(sys.modules) & {'torch', 'transformers', 'ray'})"
    env = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=env
    )
    assert shown.stdout.strip() == "set()"


def test_the_embedded_engine_without_its_packages_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "torch" else find(name, *more))
    with pytest.raises(NotAvailable, match=r'requires torch: pip install "slime-rollout\[embedded\]"'):
        choose_engine(RolloutSettings(hf_checkpoint="none"), [])


@pytest.mark.parametrize(
    ("module", "package", "extra", "call"),
    [
        ("transformers", "transformers", "transformers", lambda directory: load_tokenizer(str(directory))),
        ("reasoning_gym", "reasoning-gym", "reasoning-gym", lambda directory: reward_function("reasoning_gym")),
        ("torch", "torch", "embedded", lambda directory: read_torch(directory / "rollout.pt")),
    ],
)
def test_a_missing_package_names_the_extra_that_brings_it(
    module: str, package: str, extra: str, call: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    reward_function.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(NotAvailable, match=rf'requires the package {package}: pip install "slime-rollout\[{extra}\]"'):
        call(tmp_path)


def test_an_engine_started_by_hand_without_its_packages_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "torch" else find(name, *more))
    assert embedded_main(["--model-path", "MODEL_DIR"]) == 2
    assert 'requires the package torch: pip install "slime-rollout[embedded]"' in capsys.readouterr().err


def test_samples_are_not_written_over_what_somebody_has_kept(tmp_path: Path) -> None:
    kept = tmp_path / "samples.jsonl"
    kept.write_text("precious")
    for path, told in (
        (kept, "--overwrite"),
        (tmp_path, "a directory that exists"),
        (tmp_path / "missing" / "x", "a directory that exists"),
    ):
        with pytest.raises(InvalidSetting, match=f"--output.*{told}"):
            check_output(path, overwrite=False)
    assert kept.read_text() == "precious"
    check_output(kept, overwrite=True)
    check_output(tmp_path / "new", overwrite=False)
    write_samples(kept, [])
    assert kept.read_text() == "" and [path.name for path in tmp_path.iterdir()] == [kept.name]


def test_a_template_that_does_not_end_fails_its_prompt_alone():
    release = threading.Event()
    tokenizer = SimpleNamespace(apply_chat_template=lambda *args, **kwargs: release.wait(30))
    encoder = PromptEncoder(tokenizer)
    encoder._workers.seconds = 0.05
    try:
        with pytest.raises(DeadlineExceeded, match="prompt took longer than 0.05 s"):
            asyncio.run(encoder.prepare([Sample(prompt=[{"role": "user", "content": "12"}])]))
    finally:
        release.set()


def test_the_length_of_an_evaluation_prompt_is_found_off_the_event_loop():
    threads = []

    def render(*args, **kwargs):
        threads.append(threading.get_ident())
        return "12"

    def encode(text, **kwargs):
        threads.append(threading.get_ident())
        return [1] * len(text)

    tokenizer = SimpleNamespace(apply_chat_template=render, encode=encode)
    state = SimpleNamespace(prompts=PromptEncoder(tokenizer), plugins=SimpleNamespace(generate=None))
    sample = Sample(prompt=[{"role": "user", "content": "12"}])
    assert asyncio.run(refusal(state, sample, 2, None)) is None
    assert asyncio.run(refusal(state, Sample(prompt="123"), 2, None)) is not None
    assert len(threads) == 3 and threading.get_ident() not in threads


def test_an_output_without_space_is_told_by_its_flag() -> None:
    with pytest.raises(OutOfSpace, match="--output: no space left while writing /dev/full"):
        write_samples(Path("/dev/full"), [Sample(prompt="p")])
