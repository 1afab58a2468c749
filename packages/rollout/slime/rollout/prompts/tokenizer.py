"""The tokenizer of a Hugging Face directory, and what its files show of the model: context, template, images."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from slime.rollout.chat import template
from slime.types.errors import InvalidFile, MissingFile, NotAvailable
from slime.types.files import no_directory
from slime.types.models.vision import vision_of

# Classes that read tokenizer.json and nothing else, by the names that transformers has given them.
PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
# Types of models whose own word on the class AutoTokenizer takes; of others it may know better.
TRUSTED_TYPES = ("llama", "glm4", "glm4_moe", "gpt_oss", "qwen3", "qwen3_moe", "smollm3")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def check_directory(hf_checkpoint: str) -> None:
    """Raises MissingFile where there is no directory or no tokenizer in it; loads nothing.

    A name that is not a path is left to transformers (its cache, or the hub).
    """
    path = Path(hf_checkpoint)
    # The Hub is asked for ORG/NAME alone: without a network it takes half a minute to say that it has no "modl".
    is_path = path.is_absolute() or hf_checkpoint.startswith(".") or "/" not in hf_checkpoint or path.exists()
    if is_path and not path.is_dir():
        raise no_directory(hf_checkpoint, "--hf-checkpoint")
    if is_path and not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise MissingFile(
            f"--hf-checkpoint {hf_checkpoint} has no tokenizer: expected tokenizer.json",
            field="--hf-checkpoint",
            value=hf_checkpoint,
            expected="tokenizer.json",
        )


def load_tokenizer(hf_checkpoint: str) -> Any:
    """Returns the tokenizer as transformers loads it.

    Raises MissingFile, InvalidFile where it cannot be read, or NotAvailable without transformers.
    """
    check_directory(hf_checkpoint)
    try:
        import transformers

        # transformers before 5 has no class of this name, and imports torch for every tokenizer.
        plain = is_plain(hf_checkpoint) and hasattr(transformers, "TokenizersBackend")
        loader: Any = transformers.TokenizersBackend if plain else transformers.AutoTokenizer
    except ModuleNotFoundError as error:
        raise _no_transformers(hf_checkpoint) from error

    try:
        return loader.from_pretrained(hf_checkpoint)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidFile(
            f"--hf-checkpoint {hf_checkpoint}: its tokenizer cannot be loaded: {error}",
            field="--hf-checkpoint",
            value=hf_checkpoint,
        ) from error


def is_plain(hf_checkpoint: str) -> bool:
    """Returns True if AutoTokenizer of transformers 5 would take the class that reads tokenizer.json as it is.

    It imports torch to find that out, and half of transformers with it: 1.5 to 2.5 s of the time that a run takes to
    start. A config.json that AutoTokenizer would refuse for another reason is refused where the model is loaded.
    """
    directory = Path(hf_checkpoint)
    files = directory / "config.json", directory / "tokenizer_config.json"
    try:
        model, tokenizer = (json.loads(file.read_text(encoding="utf-8")) for file in files)
        return (
            (directory / "tokenizer.json").is_file()
            and model.get("model_type") in TRUSTED_TYPES
            and tokenizer.get("tokenizer_class") in PLAIN_CLASSES
            and not {"auto_map", "model_name"} & {*model, *tokenizer}
        )
    except (OSError, ValueError, AttributeError):
        return False


def check_transformers(hf_checkpoint: str) -> None:
    """Raises NotAvailable where transformers is not installed; imports nothing."""
    if importlib.util.find_spec("transformers") is None:
        raise _no_transformers(hf_checkpoint)


def _no_transformers(hf_checkpoint: str) -> NotAvailable:
    return NotAvailable.not_installed(f"--hf-checkpoint {hf_checkpoint}", "transformers", "slime-rollout[transformers]")


def has_chat_template(hf_checkpoint: str) -> bool:
    """Returns whether the tokenizer has a chat template; loads it only where its files do not show one.

    Raises what `load_tokenizer` raises.
    """
    if chat_template_texts(hf_checkpoint):
        return True
    return bool(getattr(load_tokenizer(hf_checkpoint), "chat_template", None))


def chat_template_texts(hf_checkpoint: str) -> dict[str, str]:
    """Returns the chat templates that the files of a tokenizer show, by file; transformers takes the first of them."""
    directory, texts = Path(hf_checkpoint), dict[str, str]()
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        try:
            text: Any = (directory / name).read_text(encoding="utf-8")
            text = text if name.endswith(".jinja") else json.loads(text).get("chat_template")
        except (OSError, ValueError, AttributeError):
            continue  # the tokenizer may not need the file; if it does, loading reports the error
        if isinstance(text, list):  # several, by name
            text = "".join(str(each.get("template", "")) for each in text if isinstance(each, dict))
        if text:
            texts[name] = str(text)
    return texts


def chat_template_fault(hf_checkpoint: str) -> str | None:
    """Returns the syntax error of the chat template with the name of its file; None for a valid template or none."""
    for name, text in chat_template_texts(hf_checkpoint).items():
        fault = template.syntax_error(text)
        return None if fault is None else f"{name}, {fault}"
    return None


def unknown_characters(hf_checkpoint: str, *texts: str) -> str:
    """Returns the characters for which the tokenizer has no token, each once: the model does not see them.

    Reads tokenizer.json without transformers; where there is none, or it cannot be read, nothing is known. White space
    is left out, since many tokenizers drop or join it on purpose.
    """
    path = Path(hf_checkpoint) / "tokenizer.json"
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path))
        model = json.loads(path.read_text(encoding="utf-8"))["model"]
    except Exception:  # tokenizers raises plain exceptions, and may not be installed
        return ""
    unknown = model.get("unk_token") or model.get("unk_id")  # that of a Unigram model is a number
    tokenizer.no_truncation()
    tokenizer.no_padding()
    lost = dict[str, None]()
    for text, encoded in zip(texts, tokenizer.encode_batch(list(texts), add_special_tokens=False), strict=True):
        seen = set[int]()
        for number, token, (first, last) in zip(encoded.ids, encoded.tokens, encoded.offsets, strict=True):
            if unknown is None or unknown not in (token, number):
                seen.update(range(first, last))
        lost |= dict.fromkeys(c for i, c in enumerate(text) if i not in seen and c.isprintable() and not c.isspace())
    return "".join(lost)


def no_tokens(characters: str) -> str:
    """Says of some unknown characters that the tokenizer has no tokens for them."""
    listed = ", ".join(map(repr, characters[:8])) + (f" and {len(characters) - 8} more" if len(characters) > 8 else "")
    return f"has no tokens for {listed}: the model does not see them"


def context_length(hf_checkpoint: str) -> int | None:
    """Returns the model's longest sequence in tokens; None if its config.json does not say."""
    path = Path(hf_checkpoint) / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_text())
    length = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    return int(length) if length else None


def reads_images(hf_checkpoint: str) -> bool:
    """Returns True for a model of a family whose images are supported."""
    path = Path(hf_checkpoint) / "config.json"
    return path.is_file() and vision_of(json.loads(path.read_text())) is not None
