"""Converts any checkpoint into a Hugging Face directory: `slime-convert to-hf --load L`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from slime.converters.torch_dist.directory import HF_DIR, TRACKER, is_torch_dist, iteration_directory
from slime.types.errors import MissingFile

_STEP = re.compile(r"(?:step|iter)_(\d+)")


def find(path: Path) -> Path:
    """Returns the newest checkpoint in `path`, or `path` itself if it is one. Raises MissingFile naming --load."""
    if is_torch_dist(path) or (path / "config.json").is_file():
        return path
    inner = path.iterdir() if path.is_dir() else iter(())
    steps = {
        int(match[1]): found
        for found in inner
        if (match := _STEP.fullmatch(found.name)) and (is_torch_dist(found) or (found / "config.json").is_file())
    }
    if not steps:
        raise MissingFile(
            f"--load: no checkpoint in {path}",
            field="--load",
            value=str(path),
            expected=f"a directory with {TRACKER}, .metadata, config.json, step_NNNNNN or iter_NNNNNNN",
        )
    return steps[max(steps)]


def needs_origin(load: str | Path) -> bool:
    """Tells whether config and tokenizer must come from elsewhere than the checkpoint. Raises MissingFile."""
    found = find(Path(load))
    return is_torch_dist(found) and not (iteration_directory(found) / HF_DIR / "config.json").is_file()


def convert(
    load: str | Path,
    output_dir: str | Path,
    *,
    fallback_hf_dir: str | Path | None = None,
    num_workers: int = 1,
    **options: Any,
) -> Path:
    """Writes `output_dir` from `load`; options as of `torch_dist_to_hf.convert`.

    fallback_hf_dir: where config and tokenizer come from if neither `origin_hf_dir` nor the checkpoint has them.
    load: what the trainer saves with either backend, what hf-to-torch-dist writes, a Hugging Face directory, or a
    directory of such checkpoints, whose newest is taken.
    """
    checkpoint = find(Path(load))
    if is_torch_dist(checkpoint):
        from slime.converters.convert import torch_dist_to_hf

        if needs_origin(checkpoint):
            options["origin_hf_dir"] = options.get("origin_hf_dir") or fallback_hf_dir
        return torch_dist_to_hf.convert(checkpoint, output_dir, num_workers=num_workers, **options)
    from slime.converters.convert import hf_to_hf

    return hf_to_hf.convert(checkpoint, output_dir, **options)
