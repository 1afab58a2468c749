"""Each replacement is there for an error of Megatron's that shows without it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is for machines without CUDA")

NO_CUDA = "AssertionError: Torch not compiled with CUDA enabled"
ERRORS = {
    "rotary_embedding": NO_CUDA,
    "overlapped_communication": NO_CUDA,
    "checkpoint_buckets": NO_CUDA,
    "random_regions": NO_CUDA,
    "token_counts": "TypeError",
    "fused_function": "AssertionError: it was compiled",
    "hard_coded_device": NO_CUDA,
    "hard_coded_device_in_a_thread": NO_CUDA,
    "router": "NameError: name 'te_general_gemm' is not defined",
    "latent_attention": "TypeError: isinstance() arg 2 must be a type",
    "offloaded_optimizer": "TypeError: '>=' not supported",
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, str]]:
    process = subprocess.run(
        [sys.executable, Path(__file__).with_name("converters_shim_cases.py")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout)


@pytest.mark.parametrize("case", ERRORS)
def test_megatron_works_with_the_shim_and_fails_without(outcomes: dict[str, dict[str, str]], case: str):
    assert outcomes[case]["with"] == "works"
    assert ERRORS[case] in outcomes[case]["without"]


def test_every_replacement_has_a_case_and_says_why(outcomes: dict[str, dict[str, str]]):
    assert outcomes.keys() == ERRORS.keys()
    from slime.converters.megatron import cpu_shim

    source = Path(__file__).with_name("converters_shim_cases.py").read_text()
    for replacement in cpu_shim.WITHOUT_CUDA + cpu_shim.WITHOUT_TRANSFORMER_ENGINE:
        assert replacement.__doc__
        assert f'("{replacement.__name__}", ' in source


def test_nothing_is_replaced_where_cuda_is_available(monkeypatch: pytest.MonkeyPatch):
    from slime.converters.megatron import cpu_shim

    def fail() -> None:
        raise AssertionError("replaced")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu_shim, "WITHOUT_CUDA", (fail,))
    monkeypatch.setattr(cpu_shim, "WITHOUT_TRANSFORMER_ENGINE", ())
    cpu_shim.install()
    with cpu_shim.on_this_thread():
        cpu_shim.enter_thread()
        assert torch.ones(1).type() == "torch.FloatTensor"
