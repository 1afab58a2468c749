"""The installed SGLang: its version and its flags."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from slime.rollout.engines.sglang.read_flags import SOURCE, ServerFlag, read_flags
from slime.types.errors import InvalidFile

QWEN3_5_KERNEL = Path("kernels/ops/attention/fused_qk_rmsnorm_rope_gate.py")
QWEN3_5_MODEL = Path("srt/models/qwen3_5.py")
# Methods of its attention: one with a kernel that reads one position of a token, one that reads three.
ONE_POSITION, THREE_POSITIONS = "forward_prepare_cuda_fused", "forward_prepare_fused_gate"
POSITION_PARAMETERS = ("self", "positions", "hidden_states")
TABLE = Path(__file__).with_name("server_flags.json")


@dataclass(frozen=True)
class ServerFlags:
    """The flags of SGLang's server. version: SGLang's version; None if the installed package does not state it.
    by_name: names without leading dashes; each alias has an entry of its own."""

    version: str | None
    by_name: dict[str, ServerFlag]


def is_installed() -> bool:
    """Returns whether `python -m sglang.launch_server` can be started, without importing it."""
    return _package() is not None


def drops_image_positions() -> bool:
    """Returns whether the installed SGLang has the kernel for Qwen3.5's attention that reads one position of a token,
    where tokens of images have three: time, row and column."""
    package = _package()
    kernel = None if package is None else package / QWEN3_5_KERNEL
    return kernel is not None and kernel.is_file() and "mrope" not in kernel.read_text(encoding="utf-8").lower()


def takes_image_positions() -> bool:
    """Returns whether the plug-in can make the installed SGLang apply all of M-RoPE to Qwen3.5: whether its attention
    has both methods, of which one takes the other's place."""
    package = _package()
    model = None if package is None else package / QWEN3_5_MODEL
    text = model.read_text(encoding="utf-8") if model is not None and model.is_file() else ""
    return all(f"def {name}({', '.join(POSITION_PARAMETERS)}):" in text for name in (ONE_POSITION, THREE_POSITIONS))


@functools.cache
def server_flags() -> ServerFlags:
    """Returns the flags of the installed SGLang, or those of the version whose table is part of this package.

    Raises InvalidFile if the flags of the installed SGLang cannot be read.
    """
    known = table()
    package = _package()
    if package is None or _version() == known.version:
        return known
    path = package.parent / SOURCE
    try:
        flags = read_flags(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        version = _version() or "of unknown version"
        raise InvalidFile(
            f"the flags of the installed SGLang {version} cannot be read from {path}: {error}",
            field="sglang",
            value=str(path),
            expected=f"SGLang {known.version}, or a version with a similar server_args.py",
        ) from error
    return ServerFlags(_version(), by_name(flags))


def table() -> ServerFlags:
    """Returns the table that `read_flags` generated from the wheel of one version."""
    content = json.loads(TABLE.read_text())
    flags = [
        ServerFlag(**entry | {key: tuple(entry[key]) for key in ("choices", "aliases") if key in entry})
        for entry in content["flags"]
    ]
    return ServerFlags(content["version"], by_name(flags))


def by_name(flags: list[ServerFlag]) -> dict[str, ServerFlag]:
    return {name: flag for flag in flags for name in (flag.name, *flag.aliases)}


def _package() -> Path | None:
    spec = importlib.util.find_spec("sglang")
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(locations[0]) if locations else None


def _version() -> str | None:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None
