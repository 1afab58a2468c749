"""Probes of the processor, with and without torch."""

from __future__ import annotations

import sys

import pytest
import torch

from slime.launcher.platform import probes
from slime.types.models import processor


def test_flags_and_torch_agree_on_this_machine() -> None:
    assert probes.multiplies_bfloat16() is processor.multiplies_bfloat16(torch)


def test_a_processor_with_avx512_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "processor_flags", lambda: {"sse", "avx512f", "avx512bw", "avx512vl", "avx512dq"})
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in probes._ISA_LIMITS:
        monkeypatch.delenv(name, raising=False)
    assert probes.multiplies_bfloat16() is True


@pytest.mark.parametrize("limit", [False, True])
def test_torch_is_asked_about_other_processors_and_below_a_limit(monkeypatch: pytest.MonkeyPatch, limit: bool) -> None:
    monkeypatch.setattr(probes, "processor_flags", lambda: set(probes._AVX512) if limit else {"sse", "avx512f"})
    if limit:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda module: module is torch and "torch said")
    assert probes.multiplies_bfloat16() == "torch said"
