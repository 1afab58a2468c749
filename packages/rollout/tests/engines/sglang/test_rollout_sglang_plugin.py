"""The plug-in that samples in one pass: when an engine is asked to use it, and for which batches it does."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.rollout.engines.sglang import plugin

NUM_GPUS = 0
PLAIN = {
    "is_all_greedy": False, "need_top_p_sampling": False, "need_top_k_sampling": False, "need_min_p_sampling": False,
    "sampling_seed": None, "return_sampling_masks": None, "temperatures": None,
}  # fmt: skip
SAMPLER = {"enable_deterministic": False, "use_ascend_backend": False, "rl_on_policy_target": None}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "some_rollout-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: some-rollout\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[{plugin.GROUP}]\n{plugin.NAME} = {plugin.__name__}:register\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "args, deterministic, asked",
    [
        ({}, False, True),
        ({"attention_backend": "flashinfer"}, False, True),
        ({"sampling_backend": "pytorch"}, False, False),
        ({"enable_deterministic_inference": True}, False, False),
        ({}, True, False),
    ],
)
def test_an_engine_samples_in_one_pass_unless_it_is_to_sample_otherwise(
    args: dict[str, Any], deterministic: bool, asked: bool
) -> None:
    assert plugin.environment(args, deterministic=deterministic) == ({plugin.VARIABLE: "1"} if asked else {})


def test_sglang_samples_by_itself_where_it_cannot_find_the_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "NAME", "of-nobody")
    assert plugin.environment({}, deterministic=False) == {}


def test_an_sglang_that_no_run_started_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "sglang", None)
    plugin.register()


def test_the_plug_in_is_loaded_without_torch() -> None:
    code = "import sys, slime.rollout.engines.sglang.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    "info, sampler, log_probs_of",
    [
        ({"is_all_greedy": True}, {}, (None, None)),
        ({"need_top_p_sampling": True}, {}, (None, None)),
        ({"need_top_k_sampling": True}, {}, (None, None)),
        ({"need_min_p_sampling": True}, {}, (None, None)),
        ({"sampling_seed": [1]}, {}, (None, None)),
        ({"return_sampling_masks": [False, True]}, {}, (None, None)),
        ({}, {"enable_deterministic": True}, (None, None)),
        ({}, {"rl_on_policy_target": "fsdp"}, (None, None)),
        ({}, {}, ([0, 2], None)),
        ({}, {}, (None, [None, [5]])),
    ],
)
def test_what_is_not_plain_sampling_stays_that_of_sglang(
    info: dict[str, Any], sampler: dict[str, Any], log_probs_of: tuple[Any, Any]
) -> None:
    arguments = (Namespace(**SAMPLER | sampler), "logits", Namespace(**PLAIN | info), True, *log_probs_of, "positions")
    assert plugin.forward(lambda *given: given, *arguments) == arguments


def test_batches_without_any_of_it_are_plain() -> None:
    assert plugin.is_plain(Namespace(**PLAIN))
    assert plugin.is_plain(Namespace(**PLAIN | {"return_sampling_masks": [False, False]}))
