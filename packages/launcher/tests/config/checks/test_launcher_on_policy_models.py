"""Models that --true-on-policy-mode cannot serve are refused before a trainer starts, in the trainer's words."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from launcher_machines import CONFIG, GIB, make_well, write_rows, write_tokenizer

from slime.launcher import cli
from slime.launcher.config import run_config
from slime.launcher.loops import session
from slime.launcher.metrics.report import Report
from slime.launcher.placement.plan import plan_placement
from slime.launcher.platform import probes
from slime.trainer.settings.on_policy import check_engine_layers
from slime.types.errors import NotAvailable


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(model)
    return ["--hf-checkpoint", str(model), "--prompt-data", str(write_rows(tmp_path / "p.jsonl")), "--num-rollout", "5",
            "--rm-type", "math", "--label-key", "label", "--output-dir", str(tmp_path / "out"),
            "--disable-rewards-normalization", "--true-on-policy-mode"]  # fmt: skip


@pytest.fixture
def refusal() -> str:
    with pytest.raises(NotAvailable, match="its heads have 8 elements") as raised:
        check_engine_layers(CONFIG)
    return str(raised.value)


def test_a_plan_for_gpus_refuses_the_model(
    words: list[str], refusal: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probes, "gpus", lambda: [])
    assert cli.main(["train", *words, "--dry-run", "--dry-run-gpus", "2"]) == 2
    assert refusal in capsys.readouterr().err
    # On a CPU, and in float32, the flag promises no equal bits.
    assert cli.main(["train", *words, "--dry-run"]) == 0
    assert cli.main(["train", *words, "--dry-run", "--dry-run-gpus", "2", "--no-bf16"]) == 0


def test_the_doctor_refuses_the_model_on_a_machine_with_gpus(
    words: list[str], refusal: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [probes.Gpu(name, "NVIDIA H100", 80 * GIB, 80 * GIB) for name in "01"]
    make_well(monkeypatch, gpus=lambda: found, torch_sees_gpus=lambda: True)
    assert cli.main(["doctor", *words]) == 1
    assert refusal in capsys.readouterr().out


def test_a_run_refuses_the_model_before_it_starts_a_process(
    words: list[str], refusal: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = run_config.parse(words)
    monkeypatch.setattr(session, "ray_cluster", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(session, "place_run", lambda launcher, rollout, _: plan_placement(launcher, rollout, [2]))
    with (
        Report(tmp_path, num_steps=5) as report,
        pytest.raises(NotAvailable) as raised,
        session.session(config, report),
    ):
        pytest.fail("the services were started")
    assert str(raised.value) == refusal
