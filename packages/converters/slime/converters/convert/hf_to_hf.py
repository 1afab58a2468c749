"""Converts a Hugging Face directory, or a trainer's checkpoint in that form, into a plain one of any dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from slime.converters.convert.hf_source import HfSource
from slime.converters.convert.workers import TorchrunRanks
from slime.converters.families import read_config
from slime.converters.families.config_json import check_vocab_size
from slime.converters.files.adapter import ADAPTER_DIR, adapter_files, copy_adapter
from slime.converters.files.finished import SPARE_BYTES, WRITER, check_hf_output, fingerprint
from slime.converters.files.hf_writer import HfFiles, HfTensor, create, divide_into_files, places
from slime.converters.files.rectangles import pieces
from slime.converters.files.safetensors_dir import SHARD_BYTES
from slime.converters.files.side_files import config_changes, copy_side_files
from slime.converters.megatron.args import check_model_args, read_model_config
from slime.types.directories import whole_directory
from slime.types.errors import InvalidSetting, counted, errors_name

Progress = Callable[[str], None]


def convert(
    load: str | Path,
    output_dir: str | Path,
    *,
    origin_hf_dir: str | Path | None = None,
    megatron_args: Mapping[str, Any] | None = None,
    model_name: str | None = None,
    vocab_size: int | None = None,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    overwrite: bool = False,
    progress: Progress = lambda text: None,
) -> Path:
    """Writes `output_dir` from the directory `load`; returns it.

    origin_hf_dir: where config and tokenizer come from, `load` by default. vocab_size: rows of every tensor that has as
    many as the config says. A LoRA adapter below `load` is copied.
    Under torchrun rank 0 writes and the others wait. Raises as `torch_dist_to_hf.convert`.
    """
    source_dir, target = Path(load), Path(output_dir).absolute()
    origin = source_dir if origin_hf_dir is None else Path(origin_hf_dir)
    with TorchrunRanks() as ranks:
        with errors_name("--load" if origin_hf_dir is None else "--origin-hf-dir"):
            config = read_config(origin)
        check_vocab_size(config, vocab_size)
        if megatron_args or model_name is not None:
            check_model_args(megatron_args or {}, read_model_config(origin, model_name))
        source = HfSource(source_dir, config)
        options = {"vocab_size": vocab_size, "dtype": dtype, "max_shard_bytes": max_shard_bytes}
        inputs = [*source.weights.files, origin / "config.json", *adapter_files(source.path / ADAPTER_DIR)]
        mark = fingerprint(inputs, options)

        def write() -> None:
            if check_hf_output(target, mark, overwrite):
                progress(f"{target} is complete: kept")
            else:
                _write(source, config, origin, target, mark, vocab_size, dtype, max_shard_bytes)
                progress(f"wrote {target}: {counted(len(source.tensors), 'tensor')}")

        ranks.on_first(write)
    source.close()
    return target


def _write(
    source: HfSource,
    config: dict[str, Any],
    origin: Path,
    target: Path,
    mark: str,
    vocab_size: int | None,
    dtype: str | None,
    max_shard_bytes: int | None,
) -> None:
    wanted = None if dtype is None else getattr(torch, dtype)
    tensors = []
    for name, info in source.tensors.items():
        kind = source.dtype(name)
        shape = info.shape
        if vocab_size is not None and shape[:1] == (config.get("vocab_size"),) and len(shape) == 2:
            shape = (vocab_size, *shape[1:])
        if shape[:1] > info.shape[:1]:
            raise InvalidSetting.must_be("--vocab-size", f"at most the {info.shape[0]} rows of {name}", got=vocab_size)
        tensors.append(HfTensor(name, wanted if wanted is not None and kind.is_floating_point else kind, shape))
    like = None if max_shard_bytes else {name: info.file.name for name, info in source.tensors.items()}
    files = divide_into_files(tensors, like=like, max_bytes=max_shard_bytes or SHARD_BYTES)
    rows = vocab_size if "vocab_size" in config else None
    changes = config_changes(was_quantized=source.is_quantized, dtype=dtype, vocab_size=rows)
    adapter = adapter_files(source.path / ADAPTER_DIR)
    size = sum(tensor.num_bytes for tensor in tensors) + sum(file.stat().st_size for file in adapter) + SPARE_BYTES
    with whole_directory(target, WRITER, field="--output-dir", need_bytes=size, alone=True, source=mark) as partial:
        create(partial, files)
        with HfFiles(places(partial, files)) as out:
            for tensor in tensors:
                for index in pieces(tensor.shape, tensor.dtype):
                    part = torch.empty([p.stop - p.start for p in index], dtype=tensor.dtype)
                    source.read(tensor.name, index, part)
                    out.write(tensor.name, index, part)
        copy_side_files(origin, partial, changes)
        if adapter:
            copy_adapter(adapter, partial / ADAPTER_DIR)
