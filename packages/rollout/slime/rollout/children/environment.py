"""The environment of processes that the rollout service starts, without credentials.

A variable that is not listed here is passed on if SLIME_ENGINE_ENV names it (`SLIME_ENGINE_ENV=NAME,OTHER`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

NAMES = frozenset(
    """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TERM TMPDIR TEMP TMP PWD HOSTNAME VIRTUAL_ENV CONDA_PREFIX
    HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
    CC CXX CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH LIBRARY_PATH MAX_JOBS COVERAGE_PROCESS_START
    """.split()
)
PREFIXES = tuple(
    """
    LC_ PYTHON LD_ XDG_ SSL_ SLIME_ MALLOC_
    OMP_ GOMP_ KMP_ MKL_ OPENBLAS_ NUMEXPR_
    CUDA CUDNN_ CUBLAS_ NVIDIA_ NVCC_ NVTE_ NVSHMEM_ NCCL_ GLOO_ UCX_ HIP_ HSA_ ROCM_ ROCR_ GPU_
    TORCH PYTORCH_ TRITON_ HF_ HUGGINGFACE_ TRANSFORMERS_ TOKENIZERS_
    PEX_ __PEX_ SGLANG_ SGL_ FLASHINFER_ DG_ TVM_ VLLM_ AITER_ MC_ MOONCAKE_
    """.split()
)
# Models are local directories, so no process needs these tokens to download one.
NEVER = frozenset({"HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN"})


def child_environment(
    overrides: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Returns the environment of a child: the variables of `environ` (default: this process's) that may be passed on,
    with `overrides` on top."""
    environ = os.environ if environ is None else environ
    requested = {name.strip() for name in environ.get("SLIME_ENGINE_ENV", "").split(",")}

    def passed_on(name: str) -> bool:
        listed = name.upper() in NAMES or name.startswith(PREFIXES)
        return name in requested or (listed and name not in NEVER)

    return {name: value for name, value in environ.items() if passed_on(name)} | dict(overrides or {})


def search_path() -> str:
    """Returns the PYTHONPATH with which a child finds the modules that this process finds."""
    return os.pathsep.join(path for path in sys.path if path)
