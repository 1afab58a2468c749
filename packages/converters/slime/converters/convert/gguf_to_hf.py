"""Converts a GGUF file (llama.cpp's format, often quantised) into a Hugging Face directory of plain weights.

transformers maps the names and undoes the layout of GGUF; this module turns the result into a directory that trains and
generates without knowing where it came from: no quantisation config, special tokens as the file names them, left
padding, the chat template kept.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.converters.files.finished import SPARE_BYTES, WRITER
from slime.converters.files.safetensors_dir import SafetensorsDir, disk_errors, write
from slime.converters.settings import DTYPES
from slime.types.directories import whole_directory
from slime.types.errors import InvalidFile, InvalidSetting, MissingFile, NotAvailable, SlimeError, counted
from slime.types.files import check_readable

if TYPE_CHECKING:
    import torch

MAGIC = b"GGUF"

Progress = Callable[[str], None]


def convert(
    gguf_file: str | Path, output_dir: str | Path, *, dtype: str = "float32", progress: Progress = lambda text: None
) -> Path:
    """Writes `output_dir` from `gguf_file`; returns `output_dir`.

    The directory appears complete or not at all. One that is complete and of this dtype is kept as it is.
    Raises MissingFile, InvalidFile (not GGUF, or cut short), NotAvailable (an architecture that transformers does not
    read), InvalidSetting (an `output_dir` that holds something else), OutOfSpace.
    """
    source, target = Path(gguf_file), Path(output_dir)
    if dtype not in DTYPES:
        raise InvalidSetting.one_of("--dtype", DTYPES, got=dtype)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        _check_complete(target, dtype)
        progress(f"{target} is complete: kept")
        return target
    progress(f"reading {source}")
    with _parsing_once():
        metadata = read_metadata(source)
        size = metadata["num_elements"] * (4 if dtype == "float32" else 2) + SPARE_BYTES
        with whole_directory(target, WRITER, field="--output-dir", need_bytes=size) as partial:
            _write_model(source, partial, metadata, dtype, progress)
    progress(f"wrote {target}")
    return target


@contextlib.contextmanager
def _parsing_once() -> Iterator[None]:
    """Caches what gguf has parsed, while a file is converted, and parses it through a plain array.

    transformers parses the whole file again for the config, the tokenizer and the weights, some seconds each where the
    vocabulary is large, and makes the table of tensor names anew for every module of the model.
    """
    import gguf

    class Reader(gguf.GGUFReader):
        @property
        def data(self) -> np.ndarray:
            return self._plain

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            # A slice of a memmap takes four times as long, and a vocabulary is half a million slices.
            self._plain = np.asarray(mapped)

    # Where transformers looks them up, at each call.
    faster = {"GGUFReader": Reader, "get_tensor_name_map": gguf.get_tensor_name_map}
    functions = {name: getattr(gguf, name) for name in faster}
    try:
        for name, function in faster.items():
            setattr(gguf, name, functools.cache(function))
        yield
    finally:
        for name, function in functions.items():
            setattr(gguf, name, function)


def read_metadata(path: Path) -> dict[str, Any]:
    """Returns `architecture`, `num_elements` and the ids `bos`, `eos`, `pad`, `unk` (None where absent) of a GGUF file.

    Raises as `convert` does.
    """
    check_readable(path, "--gguf")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != MAGIC:
        raise _invalid(path, f"not a GGUF file: it starts with {magic!r}")
    from gguf import GGUFReader

    try:
        # A string, because transformers passes one: a Path would be parsed a second time.
        reader = GGUFReader(str(path))
        end = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
    # numpy and struct raise different errors, depending on where the file ends.
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise _invalid(path, f"cut short or damaged: {error}") from None
    if path.stat().st_size < end:
        raise _invalid(path, f"cut short: {path.stat().st_size} bytes, expected {end}")

    def value(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    architecture = value("general.architecture")
    _check_architecture(path, architecture)
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return {
        "architecture": architecture,
        "num_elements": sum(int(tensor.n_elements) for tensor in reader.tensors),
        **{short: value(f"tokenizer.ggml.{name}_token_id") for short, name in names.items()},
    }


def _check_architecture(path: Path, architecture: Any) -> None:
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    if architecture not in GGUF_SUPPORTED_ARCHITECTURES:
        raise NotAvailable.unavailable(
            f"--gguf {path}",
            f"transformers cannot read its architecture {architecture!r}, only "
            + ", ".join(sorted(GGUF_SUPPORTED_ARCHITECTURES)),
        )


def _invalid(path: Path, what: str) -> InvalidFile:
    return InvalidFile(f"--gguf {path}: {what}", field="--gguf", value=str(path), expected="a GGUF file")


def _write_model(source: Path, target: Path, metadata: dict[str, Any], dtype: str, progress: Progress) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    where: dict[str, Any] = dict(pretrained_model_name_or_path=str(source.parent), gguf_file=source.name)
    config = AutoConfig.from_pretrained(**where)
    progress("reading the tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except Exception as error:  # tokenizers raises plain exceptions
        raise _invalid(source, f"its tokenizer cannot be read: {error}") from error
    _set_special_tokens(tokenizer, metadata)
    # save_pretrained writes init_kwargs, not attributes.
    tokenizer.init_kwargs["padding_side"] = tokenizer.padding_side = "left"
    tokenizer.model_max_length = getattr(config, "max_position_embeddings", tokenizer.model_max_length)
    for name in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(name, None)

    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    for name, value in ids.items():
        setattr(config, name, value)
    for name in ("_model_name_or_path", "quantization_config"):
        if name in config.__dict__:
            delattr(config, name)
    config.dtype = getattr(torch, dtype)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(skeleton).__name__]

    progress("reading and dequantising the weights")
    tensors = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=skeleton)["tensors"]
    _check_tensors(source, skeleton, tensors)
    progress(f"writing {counted(len(tensors), 'tensor')} as {dtype}")
    with disk_errors(target):
        config.save_pretrained(target)
        GenerationConfig(**ids).save_pretrained(target)
        tokenizer.save_pretrained(target)
    write(target, ((name, tensors.pop(name).to(config.dtype)) for name in sorted(tensors)))


def _set_special_tokens(tokenizer: Any, metadata: dict[str, Any]) -> None:
    # Otherwise transformers' defaults for a tokenizer family override the file's ids.
    for name in ("bos", "eos", "pad", "unk"):
        token_id = metadata[name]
        if token_id is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(int(token_id)))
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token


def _check_tensors(source: Path, skeleton: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Raises InvalidFile unless the file has every weight of the model in its shape; tied ones may be missing."""
    expected = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}
    tied = set(getattr(skeleton, "_tied_weights_keys", None) or ())
    if getattr(skeleton.config, "tie_word_embeddings", False):
        tied.add("lm_head.weight")
        tensors.pop("lm_head.weight", None)
    missing = sorted(expected.keys() - tensors.keys() - tied)
    if missing:
        raise _invalid(
            source, f"the file lacks {counted(len(missing), 'weight')} of the model: {', '.join(missing[:5])}"
        )
    for name, tensor in tensors.items():
        if name in expected and tuple(tensor.shape) != expected[name]:
            raise _invalid(source, f"{name} has shape {list(tensor.shape)}, expected {list(expected[name])}")


def _check_complete(target: Path, dtype: str) -> None:
    """Raises InvalidSetting unless `target` is a whole directory of this dtype."""
    try:
        if not target.is_dir():
            raise MissingFile("not a directory")
        weights = SafetensorsDir(target)
        for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            if not (target / name).is_file():
                raise MissingFile(f"no {name}")
        held_dtype = json.loads((target / "config.json").read_text()).get("dtype")
    except (SlimeError, ValueError) as error:
        raise InvalidSetting(
            f"--output-dir {target} exists and is not a complete model directory: {error}",
            field="--output-dir",
            value=str(target),
            expected="a new directory, or one that an earlier conversion wrote",
        ) from None
    if held_dtype != dtype or not weights.tensors:
        reason = f"the directory holds {held_dtype} weights"
        raise InvalidSetting.conflict(f"--output-dir {target}", f"--dtype {dtype}", reason)
