"""Help texts against what the flags do: their form, and the defaults that they state."""

from __future__ import annotations

import dataclasses
import json
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launcher_machines import CONFIG, write_rows, write_tokenizer

from slime.buffer.sources.evaluation import read_evaluation_files
from slime.converters import settings as converters
from slime.launcher import cli
from slime.launcher.config import run_config
from slime.launcher.config.catalogue import build_parser, declared
from slime.launcher.platform import probes
from slime.launcher.runner.runner import SlimeRunner
from slime.rollout.cli import GenerateSettings, ServeSettings
from slime.rollout.generate.state import eval_sampling_params, flat_args
from slime.trainer.cli import PlaceSettings
from slime.trainer.debug.profiler import Profiler
from slime.types.rpc import RpcSettings
from slime.types.settings import flag_help

OTHERS = (
    GenerateSettings, PlaceSettings, RpcSettings, ServeSettings, SlimeRunner,
    *(cls for cls in vars(converters).values() if dataclasses.is_dataclass(cls) and isinstance(cls, type)),
)  # fmt: skip


def every_help() -> dict[str, str]:
    """Help by flag, but for the flags that Megatron's parser describes."""
    found = {flag.spelling: flag_help(flag.field) for flag in declared().values() if flag.packages != ("megatron",)}
    for cls in OTHERS:
        found |= {f"{cls.__name__}.{f.name}": flag_help(f) for f in dataclasses.fields(cls) if f.metadata}
    return found


def test_a_help_text_is_a_phrase_that_stands_alone() -> None:
    texts = every_help()
    assert len(texts) > 250
    wrong = {
        name: text
        for name, text in texts.items()
        if not text[:1].isupper()
        or re.search(r"[^.]\.$", text)
        or re.match(r"(Of|As|The same|What|Who|How|Those)\b", text)
    }
    assert not wrong


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "unknown command 'trian'; did you mean train?"),
        (["train_async"], "unknown command 'train_async'; did you mean train-async?"),
        (["doctr"], "unknown command 'doctr'; did you mean doctor?"),
        (["eval"], "unknown command 'eval'; known ones are train, train-async, doctor"),
    ],
)
def test_a_misspelled_command_is_told_the_nearest(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err == f"slime: error: {message}\n"


def test_a_default_is_stated_once() -> None:
    """The parser appends the default of a setting that has one."""
    for flag in declared().values():
        if flag.packages != ("megatron",) and flag.default not in (None, [], {}) and flag.default is not False:
            assert "(default" not in flag.field.metadata["help"], flag.name
    text = re.sub(r"\s+", " ", build_parser(declared()).format_help())
    assert "(default: None)" not in text and "Peak learning rate (default: 1e-06)" in text


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(model)
    return ["--hf-checkpoint", str(model), "--prompt-data", str(write_rows(tmp_path / "p.jsonl")), "--num-rollout", "5",
            "--rm-type", "math", "--n-samples-per-prompt", "2"]  # fmt: skip


def plug_in_view(config: Any) -> Namespace:
    return flat_args(config.rollout, SimpleNamespace(members=[SimpleNamespace(url="http://127.0.0.1:1")]))  # type: ignore[arg-type]


def sampled(name: str) -> Callable[[Any], Any]:
    return lambda config: eval_sampling_params(Namespace(**vars(config.rollout)))[name]


# Flag -> (what its help says, flags of a run without it, what the run then does).
STATED: dict[str, tuple[str, list[str], Callable[[Any], bool]]] = {
    "output_dir": ("runs/RUN_NAME", ["--run-name", "r"], lambda c: c.output_dir == Path("runs/r")),
    "run_name": (
        "the last part of --output-dir",
        ["--output-dir", "out/run-7"],
        lambda c: c.launcher.run_name == "run-7",
    ),
    "save": ("checkpoints below --output-dir", [], lambda c: c.checkpoint_dir == c.output_dir / "checkpoints"),
    "use_tensorboard": ("on", [], lambda c: c.launcher.use_tensorboard is True),
    "actor_num_gpus_per_node": ("else 1", [], lambda c: c.launcher.actor_num_gpus_per_node == 1),
    "over_sampling_batch_size": (
        "--rollout-batch-size",
        ["--rollout-batch-size", "7"],
        lambda c: plug_in_view(c).over_sampling_batch_size == 7,
    ),
    "rollout_max_prompt_len": (
        "--rollout-max-context-len - 1",
        ["--rollout-max-context-len", "60"],
        lambda c: plug_in_view(c).rollout_max_prompt_len == 59,
    ),
    "eval_reward_key": ("--reward-key", ["--reward-key", "k"], lambda c: plug_in_view(c).eval_reward_key == "k"),
    "eval_temperature": (
        "--rollout-temperature",
        ["--rollout-temperature", "0.7"],
        lambda c: sampled("temperature")(c) == 0.7,
    ),
    "eval_top_p": ("--rollout-top-p", [], lambda c: sampled("top_p")(c) == c.rollout.rollout_top_p),
    "eval_top_k": ("--rollout-top-k", [], lambda c: sampled("top_k")(c) == c.rollout.rollout_top_k),
    "eval_max_response_len": (
        "--rollout-max-response-len",
        ["--rollout-max-response-len", "9"],
        lambda c: sampled("max_new_tokens")(c) == 9,
    ),
    "offload_rollout": ("on with --colocate", ["--colocate"], lambda c: c.rollout.offloads),
    "offload_train": ("on with --colocate", ["--colocate"], lambda c: c.trainer.offloads_train),
    "bf16": (
        "on for GPUs, off for a CPU",
        [],
        lambda c: c.trainer.on("cuda").bf16 is True and c.trainer.on("cpu").bf16 is False,
    ),
    "compile": (
        "on for GPUs, off for a CPU",
        [],
        lambda c: c.trainer.on("cuda").compile is True and c.trainer.on("cpu").compile is False,
    ),
    "profile_step_end": (
        "the one after --profile-step-start",
        ["--profile", "--profile-step-start", "3"],
        lambda c: list(Profiler(c.trainer, c.trainer, 0)._rollouts) == [3],
    ),
}
# Defaults that only a service, a GPU or another program shows.
UNSEEN = frozenset("""
    wandb_mode wandb_dir wandb_host ray_address ray_num_cpus num_gpus_per_node dry_run_gpu_gib distributed_backend
    rollout_engine_threads start_rollout_id ckpt_step ref_ckpt_step data_place async_buffer_size eval_interval
    load_debug_rollout_data_subsample save_interval save_keep save_retain_interval save_hf buffer_dir
    eval_function_path rollout_max_context_len eval_max_context_len profile_dir memory_snapshot_dir
    memory_snapshot_num_steps ref_load eps_clip_high eps_clip_c ref_update_interval log_probs_max_tokens_per_gpu
""".split())  # fmt: skip


def test_every_default_that_a_help_text_states_is_known_here() -> None:
    stating = {
        flag.name
        for flag in declared().values()
        if flag.packages != ("megatron",) and re.search(r"\bdefault( of [^:]+)?:", flag.field.metadata["help"])
    }
    assert stating == {*STATED, *UNSEEN, "rollout_num_gpus", "eval_input_key", "eval_label_key", "eval_tool_key"}


@pytest.mark.parametrize("name", STATED)
def test_the_default_is_the_one_that_the_help_states(
    name: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, more, holds = STATED[name]
    assert text in declared()[name].field.metadata["help"].partition("default")[2]
    assert holds(run_config.parse([*words, *more]))


def test_evaluation_files_have_the_columns_of_the_prompts(words: list[str], tmp_path: Path) -> None:
    rows = tmp_path / "eval.jsonl"
    rows.write_text(json.dumps({"q": "1 + 1", "a": "2", "t": []}) + "\n")
    named = ["--input-key", "q", "--label-key", "a", "--tool-key", "t", "--eval-prompt-data", "set", str(rows)]
    (tmp_path / "p.jsonl").write_text(json.dumps({"q": "1 + 1", "a": "2"}) + "\n")
    (template,) = read_evaluation_files(run_config.parse([*words, *named]).buffer)["set"]
    assert b"1 + 1" in template


@pytest.mark.parametrize(("more", "gpus"), [((), 1), (("--colocate", "--actor-num-gpus-per-node", "2"), 2)])
def test_engines_get_the_gpus_that_the_help_states(
    more: tuple[str, ...], gpus: int, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The plan of a run on a node of 8 GPUs, which gave all of them to engines by the text and one by the plan."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probes, "gpus", lambda: [])
    assert (
        "default of `slime train`: one, or with --colocate the trainer's"
        in declared()["rollout_num_gpus"].field.metadata["help"]
    )
    assert cli.main(["train", *words, *more, "--dry-run", "--dry-run-gpus", "8", "--n-samples-per-prompt", "2"]) == 0
    assert len(re.findall(r"GPU \d: .*sglang-\d", capsys.readouterr().out)) == gpus
