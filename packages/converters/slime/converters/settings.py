"""Settings of the subcommands of `slime-convert`."""

from __future__ import annotations

from dataclasses import dataclass

from slime.types.settings import REQUIRED, setting

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(kw_only=True)
class GgufToHfSettings:
    """A GGUF file into a Hugging Face directory."""

    gguf: str = setting(REQUIRED, "the GGUF file", metavar="FILE")
    output_dir: str = setting(REQUIRED, "directory to write; a complete one is kept", metavar="DIR")
    dtype: str = setting("float32", "type of the weights written", choices=DTYPES)


@dataclass(kw_only=True)
class InspectSettings:
    """Names, shapes and types of the tensors of a directory or file."""

    containing: str = setting("", "only tensors whose name contains this", metavar="TEXT")
    json: bool = setting(False, "print JSON")


@dataclass(kw_only=True)
class VerifySettings:
    """Whether two directories or files hold the same tensors."""

    atol: float = setting(0.0, "largest difference that counts as equal; 0 compares bits and dtypes", minimum=0)
    max_shown: int = setting(10, "differing tensors to name", minimum=1)
