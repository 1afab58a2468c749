"""Settings of the subcommands of `slime-convert`."""

from __future__ import annotations

from dataclasses import dataclass

from slime.types.settings import REQUIRED, setting

DTYPES = ("float32", "bfloat16", "float16")
OUTPUT = "Directory to write; the result of an earlier conversion of the same files is kept"


@dataclass(kw_only=True)
class HfToGgufSettings:
    """Converts a Hugging Face directory into a GGUF file."""

    hf_checkpoint: str = setting(REQUIRED, "Hugging Face directory of a llama, qwen2 or qwen3 model", metavar="DIR")
    output: str = setting(REQUIRED, "File to write", metavar="FILE.gguf")


@dataclass(kw_only=True)
class GgufToHfSettings:
    """Converts a GGUF file into a Hugging Face directory."""

    gguf: str = setting(REQUIRED, "GGUF file to read", metavar="FILE")
    output_dir: str = setting(REQUIRED, "Directory to write; a complete one is kept", metavar="DIR")
    dtype: str = setting("float32", "Data type of the written weights", choices=DTYPES)


@dataclass(kw_only=True)
class _ConversionSettings:
    model_name: str | None = setting(
        None,
        "Model family to assume in place of the model_type in config.json: a model_type, or a name with one in it, as "
        "in Qwen3-4B",
        metavar="NAME",
    )
    num_workers: int = setting(1, "Processes that share the work, on each rank of torchrun", minimum=1)
    overwrite: bool = setting(False, "Replace the result of another conversion in the directory")


@dataclass(kw_only=True)
class HfToTorchDistSettings(_ConversionSettings):
    """Converts a Hugging Face directory into a torch_dist checkpoint of Megatron.

    Also takes Megatron's flags (MODEL_ARGS, parallel sizes) and compares them with the config.
    """

    hf_checkpoint: str = setting(REQUIRED, "Hugging Face directory to read", metavar="DIR")
    save: str = setting(REQUIRED, OUTPUT, metavar="DIR")
    model_type: str | None = setting(
        None, "Known model (qwen3-4B, ...) whose flags are compared with the config", metavar="NAME"
    )
    dtype: str | None = setting(None, "Data type of the written weights (default: the source's)", choices=DTYPES)


@dataclass(kw_only=True)
class _HfOutputSettings(_ConversionSettings):
    output_dir: str = setting(REQUIRED, OUTPUT, metavar="DIR")
    origin_hf_dir: str | None = setting(
        None, "Hugging Face directory with config and tokenizer (default: those in the checkpoint)", metavar="DIR"
    )
    vocab_size: int | None = setting(None, "Rows of the embedding (default: the config's)", minimum=1)
    dtype: str | None = setting(None, "Data type of the written weights (default: the checkpoint's)", choices=DTYPES)
    max_shard_size: str | None = setting(
        None, "Largest size of a file, as in 5GB (default: the files of the source)", metavar="SIZE"
    )


@dataclass(kw_only=True)
class TorchDistToHfSettings(_HfOutputSettings):
    """Converts a torch_dist checkpoint into a Hugging Face directory."""

    input_dir: str = setting(
        REQUIRED, "Directory of the torch_dist checkpoint, or of one of its iterations", metavar="DIR"
    )


@dataclass(kw_only=True)
class ToHfSettings(_HfOutputSettings):
    """Converts any checkpoint of a training run into a Hugging Face directory.

    Also takes the flags of training, Megatron's among them, and compares those of the model with its config.
    """

    load: str = setting(
        REQUIRED, "Checkpoint to read, or a directory of checkpoints, whose newest is read", metavar="DIR"
    )
    hf_checkpoint: str | None = setting(
        None, "Hugging Face directory with config and tokenizer for a checkpoint that has none", metavar="DIR"
    )


@dataclass(kw_only=True)
class InspectSettings:
    """Prints names, shapes and types of the tensors in a directory or file: Hugging Face or torch_dist."""

    containing: str = setting("", "Show only tensors whose name contains this text", metavar="TEXT")
    finite: bool = setting(False, "Read the values too, and count those that are infinite or not a number")
    json: bool = setting(False, "Print JSON")


@dataclass(kw_only=True)
class VerifySettings:
    """Compares the tensors of two directories or files: Hugging Face or torch_dist."""

    atol: float = setting(0.0, "Largest difference that counts as equal; 0 compares bits and dtypes", minimum=0)
    max_shown: int = setting(10, "Maximum number of differing tensors to name", minimum=1)


@dataclass(kw_only=True)
class ModelArgsSettings:
    """Writes MODEL_ARGS of a model from its config.json, or compares an existing file with it."""

    hf_checkpoint: str | None = setting(
        None, "Hugging Face directory whose config.json describes the model", metavar="DIR"
    )
    model_type: str | None = setting(
        None, "Known model in place of --hf-checkpoint: qwen3-4B, glm4-9B, ...", metavar="NAME"
    )
    check: str | None = setting(None, "Shell file whose MODEL_ARGS are compared with the model", metavar="FILE.sh")
    output: str | None = setting(None, "File to write (default: standard output)", metavar="FILE.sh")
