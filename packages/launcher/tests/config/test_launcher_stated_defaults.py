"""Defaults that help texts state in words, against what a run without the flag does."""

from __future__ import annotations

import json
import math
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from launcher_machines import CONFIG, write_rows, write_tokenizer

from slime.buffer.groups.evaluation import read_evaluation_files
from slime.buffer.store.opening import Directory
from slime.launcher import cli
from slime.launcher.config import run_config
from slime.launcher.config.catalogue import declared
from slime.launcher.loops.services import Services
from slime.launcher.metrics.sinks.base import TrackedRun
from slime.launcher.metrics.sinks.mlflow import Mlflow
from slime.launcher.metrics.sinks.swanlab import Swanlab
from slime.launcher.metrics.sinks.trackio import Trackio
from slime.launcher.metrics.sinks.wandb import Wandb
from slime.launcher.placement.plan import core_environment, plan_placement
from slime.launcher.plan.batches import longest_sample
from slime.launcher.plan.report import hardware_of
from slime.launcher.platform import probes, ray_cluster
from slime.launcher.run_directory.checkpoints import continued_step, prune
from slime.launcher.services.generation import pace_of
from slime.launcher.services.start import _Start
from slime.rollout.engines.embedded import launch
from slime.rollout.engines.registry import KINDS
from slime.rollout.generate.state import eval_sampling_params, flat_args, fleet_options
from slime.rollout.prompts.tokenizer import context_length
from slime.trainer.algorithms.policy_loss import clipped_loss
from slime.trainer.backends.fsdp import critic
from slime.trainer.backends.fsdp.backend import FsdpBackend
from slime.trainer.checkpoints.checkpoint import TrainerState
from slime.trainer.debug import memory
from slime.trainer.debug.profiler import Profiler
from slime.trainer.process.collective import _process_groups


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(model)
    return ["--hf-checkpoint", str(model), "--prompt-data", str(write_rows(tmp_path / "p.jsonl")), "--num-rollout", "5",
            "--rm-type", "math", "--label-key", "label", "--n-samples-per-prompt", "2"]  # fmt: skip


def plug_in_view(config: Any) -> Namespace:
    engine = SimpleNamespace(url="http://127.0.0.1:1")
    fleet = SimpleNamespace(members=[engine], address=None, on_new_address=lambda listener: None)
    return flat_args(config.rollout, fleet)  # type: ignore[arg-type]


def sampled(name: str) -> Callable[[Any], Any]:
    return lambda config: eval_sampling_params(Namespace(**vars(config.rollout)))[name]


# Flag -> (what its help says, flags of a run without it, what the run then does).
STATED: dict[str, tuple[str, list[str], Callable[[Any], bool]]] = {
    "output_dir": ("runs/RUN_NAME", ["--run-name", "r"], lambda c: c.output_dir == Path("runs/r")),
    "run_name": ("the last part of --output-dir", ["--output-dir", "out/r"], lambda c: c.launcher.run_name == "r"),
    "save": ("checkpoints below --output-dir", [], lambda c: c.checkpoint_dir == c.output_dir / "checkpoints"),
    "release_committed": ("on", [], lambda c: c.buffer.release_committed is True),
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
    "eval_reward_key": (
        "--reward-key",
        ["--reward-key", "k", "--rm-type", "dapo"],
        lambda c: plug_in_view(c).eval_reward_key == "k",
    ),
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
    "rollout_engine_max_running_requests": (
        "256",
        [],
        lambda c: "up to 256 sequences" in KINDS["embedded"].memory(c.rollout).because,
    ),
    "rollout_stream_interval": (
        "64 with the embedded engine; 0 with SGLang, whose rollouts take 7 % longer with 64, and with --deterministic",
        ["--deterministic"],
        lambda c: (KINDS["embedded"].stream_interval, fleet_options(c.rollout).stream_interval) == (64, 0),
    ),
    "offload_rollout": ("with --colocate", ["--colocate"], lambda c: c.rollout.offloads),
    "offload_train": ("with --colocate", ["--colocate"], lambda c: c.trainer.offloads_train),
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
# Flag -> the test that shows its default, where it takes a trainer or a rollout service; test_files_to_touch.py of
# tests/packaging, which has all tests at hand, looks for them.
SHOWN_BY: dict[str, str] = {
    "use_fault_tolerance": "test_rollout_restart_limits.py::test_engines_are_started_again_where_that_is_possible",
    "async_buffer_size": "test_launcher_async.py::"
    "test_by_default_each_rollout_is_made_with_the_weights_of_one_step_before",
    "load_debug_rollout_data_subsample": "test_launcher_replay.py::"
    "test_groups_keep_their_order_and_samples_get_a_place_in_the_buffer",
    "lr_decay_iters": "test_launcher_learning_rate.py::test_the_learning_rate_falls_over_the_updates_of_the_run",
    "eval_function_path": "test_rollout_service.py::test_evaluation_repeats_itself_and_stores_nothing",
    "eval_max_context_len": "test_rollout_default.py::test_the_context_caps_the_response",
    "ref_load": "test_trainer_step.py::test_a_reference_equal_to_the_policy_has_no_divergence",
    "ref_update_interval": "test_trainer_old_policies.py::test_the_policy_becomes_the_reference_model",
    "log_probs_max_tokens_per_gpu": "test_trainer_schedules.py::test_how_passes_are_made_changes_nothing",
    "rollout_engine_max_total_tokens": "test_rollout_engine_memory.py::"
    "test_engines_on_one_machine_share_half_of_its_memory",
}
# Flag -> the words of its help, for defaults that the tests below show. The names are those of the tests' `states`.
WORDS: dict[str, str] = {}


def states(**words: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Marks a test that shows the defaults of flags."""
    WORDS.update(words)
    return lambda test: test


@states(wandb_dir="--output-dir", wandb_host="W&B's own", wandb_mode="online")
def test_wandb_keeps_its_own_server_and_mode(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mode and a URL the package goes online, to wandb.ai."""
    asked: dict[str, Any] = {}
    module: Any = ModuleType("wandb")
    module.init, module.Settings, module.Error = lambda **options: asked.update(options), dict, RuntimeError
    monkeypatch.setitem(sys.modules, "wandb", module)
    Wandb(run_config.parse(words).launcher, TrackedRun(name="r", output_dir=tmp_path, config={}))
    assert (asked["mode"], asked["settings"], asked["dir"]) == (None, {}, str(tmp_path))


@states(
    trackio_space_id="TRACKIO_SPACE_ID, else files in TRACKIO_DIR on this machine",
    mlflow_tracking_uri="MLFLOW_TRACKING_URI, else MLflow's own",
    swanlab_workspace="that of the key in SWANLAB_API_KEY",
    swanlab_mode="online",
)
def test_other_trackers_keep_their_own_servers_and_modes(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without these settings the packages follow their own variables."""
    asked: dict[str, Any] = {}
    for name in ("trackio", "swanlab", "mlflow", "mlflow.entities"):
        module: Any = ModuleType(name)
        module.init = lambda **options: asked.update(options)
        module.MlflowClient = lambda tracking_uri: asked.update(tracking_uri=tracking_uri) or MagicMock()
        monkeypatch.setitem(sys.modules, name, module)
    run, settings = TrackedRun(name="r", output_dir=tmp_path, config={}), run_config.parse(words).launcher
    for sink in (Trackio, Swanlab, Mlflow):
        sink(settings, run)
    keys = ("space_id", "tracking_uri", "workspace", "mode")
    assert [asked[key] for key in keys] == [None] * 4


@states(ray_address="RAY_ADDRESS, else a Ray of the run's own", ray_num_cpus="all")
def test_a_run_joins_the_cluster_of_ray_address_or_starts_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    joined, started = [], []
    monkeypatch.setattr(ray_cluster, "_join", lambda address, options: joined.append(address))
    monkeypatch.setattr(ray_cluster, "_start", lambda stack, options: started.append(options["num_cpus"]))
    monkeypatch.setattr(ray_cluster, "check_that_ray_asks_for_its_token", lambda: None)
    for address in ("", "10.0.0.1:6379"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with ray_cluster.ray_cluster(None):
            pass
    # Without a number Ray counts the CPUs itself.
    assert joined == ["10.0.0.1:6379"] and started == [None]


@states(num_gpus_per_node="all that Ray reports")
def test_a_run_may_use_every_gpu_of_a_node(words: list[str]) -> None:
    config = run_config.parse([*words, "--rollout-num-gpus", "7"])
    assert plan_placement(config.launcher, config.rollout, 8).engines[0].gpus == 7


@states(dry_run_gpu_gib="this machine's")
def test_a_dry_run_plans_for_the_gpus_of_this_machine(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "gpus", lambda: [probes.Gpu("0", "H100", 80 << 30, 79 << 30)])
    assert hardware_of(run_config.parse([*words, "--dry-run"])).gpu_bytes == 80 << 30


@states(distributed_backend="nccl on GPUs, else gloo")
def test_collectives_are_of_nccl_where_there_are_gpus() -> None:
    assert (_process_groups(None, "cuda", 2), _process_groups(None, "cpu", 2)) == ("cpu:gloo,cuda:nccl", "gloo")


@states(
    rollout_engine_threads="OMP_NUM_THREADS, else a share of all cores; 1 for models narrower than 256",
    trainer_num_threads="OMP_NUM_THREADS, else a share of all cores; 1 with GPUs and for models narrower than 256",
)
def test_torch_has_the_threads_of_the_environment(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads OMP_NUM_THREADS, and takes all cores without it; Ray makes it 1 where nobody sets it."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert core_environment(2, 576)["OMP_NUM_THREADS"] == str(max(1, probes.cpus() // 2))
    options: list[Any] = []
    monkeypatch.setattr(launch, "start_embedded", lambda chosen, **_: options.append(chosen))
    for start in KINDS["embedded"].starts(run_config.parse(words).rollout, []):
        start()
    assert options[0].threads is None


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoints"
    for step in (2, 4, 10):
        path = directory / f"step_{step:06d}"
        path.mkdir(parents=True)
        (path / "trainer.json").write_text(json.dumps({"step": step}))
        (path / "config.json").write_text(json.dumps(CONFIG))
        (path / "data_place.jsonl").touch()
    return directory


@states(
    ckpt_step="the newest in the directory",
    ref_ckpt_step="the newest in the directory",
    opd_teacher_ckpt_step="the newest in the directory",
)
def test_the_newest_checkpoint_is_loaded(words: list[str], checkpoints: Path) -> None:
    teacher = ["--use-opd", "--opd-type", "trainer", "--opd-teacher-load", str(checkpoints)]
    others = ["--load", str(checkpoints), "--ref-load", str(checkpoints), "--use-kl-loss"]
    trainer = run_config.parse([*words, *others, *teacher]).trainer
    assert trainer.load == trainer.ref_load == trainer.opd_teacher_load == str(checkpoints / "step_000010")


@states(critic_load="--hf-checkpoint", critic_lr="--lr")
def test_a_critic_starts_from_the_model_with_the_policys_rate(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FsdpBackend, "__init__", lambda self, settings, *_: setattr(self, "settings", settings))
    monkeypatch.setattr(critic, "load_critic", lambda path, flag, **_: path)
    settings = run_config.parse([*words, "--advantage-estimator", "ppo", "--lr", "3e-6"]).trainer
    made = critic.FsdpCritic(settings, None, None)  # type: ignore[arg-type]
    assert made.settings.lr == 3e-6
    assert made._load(None) == (settings.hf_checkpoint, "--hf-checkpoint")


@states(start_rollout_id="the one after the checkpoint's, else 0", data_place="the file of the checkpoint in --load")
def test_a_run_goes_on_after_its_checkpoint(words: list[str], checkpoints: Path) -> None:
    config = run_config.parse([*words, "--load", str(checkpoints)])
    assert continued_step(config.trainer.load, config.launcher.start_rollout_id) == 10
    start = object.__new__(_Start)
    start.config = config
    assert start._data_place() == str(checkpoints / "step_000010" / "data_place.jsonl")
    assert TrainerState().step + 1 == 0


@states(eval_interval="only these two", save_interval="no checkpoints")
def test_a_run_evaluates_and_saves_as_often_as_the_help_states(words: list[str], tmp_path: Path) -> None:
    config = run_config.parse([*words, "--eval-prompt-data", "set", str(tmp_path / "p.jsonl")])
    assert [config.evaluates_after(step) for step in range(5)] == [False, False, False, False, True]
    assert not config.launcher.skip_eval_before_train
    assert not any(config.saves_after(step) for step in range(5))


@states(save_keep="keep all", save_retain_interval="keep all", save_hf="no exports")
def test_checkpoints_are_kept_and_not_exported(words: list[str], checkpoints: Path) -> None:
    settings = run_config.parse(words).launcher
    assert prune(checkpoints, keep=settings.save_keep, retain_interval=settings.save_retain_interval) == []
    run = MagicMock(**{"_settings.save_keep": None, "_settings.save_retain_interval": None})
    Services.save(run, 0, checkpoints, settings.save_hf)
    run.export.assert_not_called()
    Services.save(run, 0, checkpoints, "hf/{rollout_id}")
    run.export.assert_called_once_with(Path("hf/0"))


@states(max_staleness="2", staleness_policy="wait")
def test_a_fully_asynchronous_run_waits_for_groups_that_are_two_updates_late(words: list[str]) -> None:
    pace = pace_of(run_config.parse([*words, "--fully-async"], check=False))
    assert (pace.max_staleness, pace.policy) == (2, "wait")


@states(buffer_dir="a temporary one, removed at the end")
def test_the_state_of_a_buffer_goes_with_it(words: list[str]) -> None:
    directory = Directory(run_config.parse(words).buffer.buffer_dir)
    assert directory.path.is_dir()
    directory.close()
    assert not directory.path.exists()


@states(rollout_max_context_len="the model's", eval_max_context_len="--rollout-max-context-len")
def test_the_context_is_that_of_the_model(words: list[str]) -> None:
    rollout = run_config.parse([*words, "--rollout-max-response-len", "100000"]).rollout
    assert longest_sample(rollout, CONFIG)[0] == CONFIG["max_position_embeddings"]
    assert context_length(rollout.hf_checkpoint) == CONFIG["max_position_embeddings"]


@states(
    profile_dir="profiles below --output-dir",
    memory_snapshot_dir="memory below --output-dir",
    memory_snapshot_num_steps="when the trainer stops",
)
def test_traces_and_records_lie_below_the_output_directory(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[Path] = []
    monkeypatch.setattr(memory, "_Torch", lambda path: SimpleNamespace(stop=lambda: stopped.append(path)))
    settings = run_config.parse([*words, "--record-memory-history"]).trainer
    args = Namespace(output_dir="out")
    assert Profiler(settings, args, 0)._directory == Path("out/profiles")
    record = memory.MemoryRecord(settings, args, 0)
    for _ in range(100):
        record.trained()
    assert stopped == []
    record.close()
    assert stopped == [Path("out/memory/memory-rank-0.pickle")]


@states(eps_clip_high="--eps-clip", eps_clip_c="no dual clip")
def test_the_ratio_is_clipped_alike_on_both_sides_and_once(words: list[str]) -> None:
    s = run_config.parse(words).trainer
    # Ratios e^3, 1 / e^3; where A < 0 the loss of a large ratio grows without a bound.
    ppo_kl, advantages = torch.tensor([-3.0, 3.0, -3.0]), torch.tensor([1.0, -1.0, -1.0])
    loss, _ = clipped_loss(ppo_kl, advantages, s.eps_clip, s.eps_clip_high, s.eps_clip_c)
    torch.testing.assert_close(loss, torch.tensor([-(1 + s.eps_clip), 1 - s.eps_clip, math.exp(3)]))


@pytest.mark.parametrize("name", WORDS)
def test_the_help_states_what_a_test_shows(name: str) -> None:
    assert WORDS[name] in declared()[name].field.metadata["help"].partition("default")[2]


def test_every_default_that_a_help_text_states_is_shown() -> None:
    stating = {
        flag.name
        for flag in declared().values()
        if flag.packages != ("megatron",) and re.search(r"\bdefault( of [^:]+)?:", flag.field.metadata["help"])
    }
    columns = {"eval_input_key", "eval_label_key", "eval_tool_key"}
    assert stating == {*STATED, *WORDS, *SHOWN_BY, *columns, "rollout_num_gpus"}


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
    """On a node of 8 GPUs; the help once named all of them where the plan took one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probes, "gpus", lambda: [])
    text = declared()["rollout_num_gpus"].field.metadata["help"]
    assert "default of `slime train`: one, or with --colocate the trainer's" in text
    assert cli.main(["train", *words, *more, "--dry-run", "--dry-run-gpus", "8", "--n-samples-per-prompt", "2"]) == 0
    assert len(re.findall(r"GPU \d: .*sglang-\d", capsys.readouterr().out)) == gpus
