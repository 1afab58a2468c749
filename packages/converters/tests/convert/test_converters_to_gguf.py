"""A model written as GGUF comes back from transformers' reader of GGUF with the same logits and the same tokens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from slime.converters.cli import main
from slime.converters.convert import gguf_to_hf
from slime.converters.convert.hf_to_gguf import _by_bytes, convert
from slime.types.errors import InvalidFile, InvalidSetting, MissingFile, NotAvailable

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def write_tokenizer(directory: Path, pattern: str | None = QWEN2, *, digits: bool = False) -> None:
    letters = list(bytes_to_unicode().values())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *letters, "ab"])}
    core = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    parts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated")] if pattern else []
    parts += [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", bos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)


def write_model(directory: Path, kind: str, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    # More rows than the tokenizer has tokens, as real models have; and heads of the width that transformers' reader of
    # GGUF takes for that of every qwen3.
    config = CONFIGS[kind](
        vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, dtype=dtype,
        **({"head_dim": 128} if kind == "qwen3" else {}),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("llama", True), ("qwen2", False), ("qwen3", True)])
def test_logits_survive_the_way_to_gguf_and_back(kind: str, tied: bool, tmp_path: Path) -> None:
    source = write_model(tmp_path / "hf", kind, tied=tied)
    back = gguf_to_hf.convert(convert(source, tmp_path / "model.gguf"), tmp_path / "back")
    ids = torch.tensor([[3, 90, 5, 262, 7, 200]])
    with torch.no_grad():
        first, second = (AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (source, back))
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


def test_the_tokenizer_and_its_template_survive(tmp_path: Path) -> None:
    source = write_model(tmp_path / "hf", "qwen3")
    back = gguf_to_hf.convert(convert(source, tmp_path / "model.gguf"), tmp_path / "back")
    before, after = (AutoTokenizer.from_pretrained(path) for path in (source, back))
    text = "<|im_start|>abba 12<|im_end|>ü"
    assert before(text)["input_ids"] == after(text)["input_ids"]
    assert (after.eos_token, after.chat_template) == ("<|im_end|>", TEMPLATE)


def test_bfloat16_stays_bfloat16_but_for_vectors(tmp_path: Path) -> None:
    source = write_model(tmp_path / "hf", "qwen2", dtype=torch.bfloat16)
    tensors = {t.name: t.tensor_type.name for t in gguf.GGUFReader(convert(source, tmp_path / "m.gguf")).tensors}
    assert tensors["blk.0.attn_q.weight"] == "BF16"
    assert tensors["blk.0.attn_q.bias"] == tensors["output_norm.weight"] == "F32"


@pytest.mark.parametrize(
    ("pattern", "digits", "name"),
    [(QWEN2, False, "qwen2"), (LLAMA3, False, "llama-bpe"), (None, True, "smollm"), (None, False, "gpt-2")],
)
def test_the_pre_tokenizer_gets_the_name_that_llama_cpp_has_for_it(
    pattern: str | None, digits: bool, name: str, tmp_path: Path
) -> None:
    source = write_model(tmp_path / "hf", "llama")
    write_tokenizer(source, pattern, digits=digits)
    reader = gguf.GGUFReader(convert(source, tmp_path / "m.gguf"))
    assert reader.get_field("tokenizer.ggml.pre").contents() == name


def test_a_tokenizer_without_merges_and_a_config_without_defaults_are_written(tmp_path: Path) -> None:
    source = write_model(tmp_path / "hf", "qwen3")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = []
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((source / "config.json").read_text())
    for key in ("rms_norm_eps", "head_dim"):
        del config[key]
    (source / "config.json").write_text(json.dumps(config))
    reader = gguf.GGUFReader(convert(source, tmp_path / "m.gguf"))
    assert len(reader.get_field("tokenizer.ggml.merges").contents()) == 1
    assert reader.get_field("qwen3.attention.key_length").contents() == 128
    assert reader.get_field("qwen3.attention.layer_norm_rms_epsilon").contents() == pytest.approx(1e-6)
    change(source / "config.json", hidden_size=None)
    with pytest.raises(InvalidFile, match="config.json has no hidden_size"):
        convert(source, tmp_path / "m.gguf")


def write_character_tokenizer(directory: Path, characters: str) -> None:
    """Writes the kind that models of `slime init` and of the quickstart had before theirs became byte-level BPEs."""
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.add_special_tokens([AddedToken(token, special=True) for token in ("<pad>", "<eos>")])
    core.decoder = decoders.Fuse()
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>").save_pretrained(directory)


def test_a_tokenizer_of_characters_is_written_as_the_same_one_by_bytes(tmp_path: Path) -> None:
    source = write_model(tmp_path / "hf", "qwen3")
    write_character_tokenizer(source, "0123456789+= x")
    old = AutoTokenizer.from_pretrained(source)
    target = convert(source, tmp_path / "m.gguf")
    tokens = gguf.GGUFReader(target).get_field("tokenizer.ggml.tokens").contents()
    assert tokens[:16] == ["<pad>", "<eos>", *"0123456789+=", "\u0120", "x"]
    by_bytes = _by_bytes(json.loads((source / "tokenizer.json").read_text()))
    by_bytes["model"] |= {"unk_token": "<pad>"}
    new = Tokenizer.from_str(json.dumps(by_bytes | {"decoder": None}))
    for text in ("12+ 3=15", "x = 0<eos>"):
        assert new.encode(text).ids == old.encode(text)
    write_character_tokenizer(source, "01\u00e4")
    with pytest.raises(NotAvailable, match=r"\(WordLevel\) is not a byte-level BPE.*use llama.cpp's convert"):
        convert(source, target)


def change(path: Path, **keys: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_models_that_would_come_out_wrong_are_refused(tmp_path: Path) -> None:
    source, target = write_model(tmp_path / "hf", "llama"), tmp_path / "m.gguf"
    write_tokenizer(source, r"\w+|\W+")
    with pytest.raises(NotAvailable, match="llama.cpp has no name for its pre-tokenizer"):
        convert(source, target)
    change(source / "tokenizer.json", model={"type": "WordLevel"})
    with pytest.raises(NotAvailable, match="not a byte-level BPE"):
        convert(source, target)
    change(source / "config.json", rope_parameters={"rope_type": "yarn", "factor": 2})
    with pytest.raises(NotAvailable, match=r"its positions are scaled \(yarn\)"):
        convert(source, target)
    change(source / "config.json", model_type="mamba")
    with pytest.raises(NotAvailable, match="model_type 'mamba' is not supported yet: known are llama, qwen2, qwen3"):
        convert(source, target)
    (source / "tokenizer.json").unlink()
    change(source / "config.json", model_type="llama", rope_parameters=None)
    with pytest.raises(InvalidFile, match="tokenizer.json"):
        convert(source, target)
    assert not target.exists() and not list(tmp_path.glob(".m.gguf*"))


def without(weights: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {each: tensor for each, tensor in weights.items() if each != name}


@pytest.mark.parametrize(
    ("config", "weights", "problem"),
    [
        ({}, lambda w: without(w, "model.layers.0.self_attn.q_proj.weight"), "1 missing: .*0.self_attn.q_proj.weight$"),
        ({}, lambda w: w | {"zzz": torch.ones(1)}, "1 unexpected: zzz$"),
        ({}, lambda w: w | {"model.norm.weight": torch.ones(31)}, r"1 of another shape: model.norm.weight \[31\]"),
        ({}, lambda w: w | {"model.norm.weight": torch.ones(32, dtype=torch.int64)}, "1 not of a floating-point type"),
        ({"num_hidden_layers": 3}, lambda w: w, "12 missing: model.layers.2"),
        ({"vocab_size": 999}, lambda w: w, "2 of another shape"),
    ],
    ids=["missing", "unexpected", "shape", "integers", "layers", "vocabulary"],
)
def test_weights_of_another_model_than_the_config_says_are_refused(
    config: dict[str, int], weights: Callable[..., dict[str, torch.Tensor]], problem: str, tmp_path: Path
) -> None:
    source, target = write_model(tmp_path / "hf", "qwen2"), tmp_path / "m.gguf"
    change(source / "config.json", **config)
    file = source / "model.safetensors"
    save_file(weights(load_file(file)), file)
    with pytest.raises(InvalidFile, match=f"its tensors are not those of the model in config.json: {problem}"):
        convert(source, target)
    assert not target.exists()


def test_a_gguf_whose_tokenizer_cannot_be_read_is_refused(tmp_path: Path) -> None:
    source = write_model(tmp_path / "hf", "qwen3")
    write_character_tokenizer(source, "0123456789")
    target = convert(source, tmp_path / "m.gguf")
    with pytest.raises(InvalidFile, match="m.gguf: its tokenizer cannot be read"):
        gguf_to_hf.convert(target, tmp_path / "back")


def test_a_place_that_takes_no_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidSetting, match="--output must be a file in a directory that exists"):
        convert(tmp_path, tmp_path / "none" / "m.gguf")
    with pytest.raises(InvalidSetting, match="not a regular file"):
        convert(tmp_path, tmp_path)
    (tmp_path / "notes.txt").write_text("precious")
    with pytest.raises(InvalidSetting, match="notes.txt is not a GGUF file, and is not replaced"):
        convert(tmp_path, tmp_path / "notes.txt")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")  # of an earlier conversion
    with pytest.raises(MissingFile, match="config.json"):
        convert(tmp_path, tmp_path / "m.gguf")
    assert main(["hf-to-gguf", "--hf-checkpoint", str(tmp_path), "--output", str(tmp_path / "m.gguf")]) == 2
    assert "config.json" in capsys.readouterr().err


# Converts argv[1] to argv[2], and says when it has begun to write; then it waits.
STOPS = """
import signal, sys
import gguf
from slime.converters.cli import main
def stop(writer):
    print("writing", flush=True)
    signal.pause()
gguf.GGUFWriter.write_kv_data_to_file = stop
sys.exit(main(["hf-to-gguf", "--hf-checkpoint", sys.argv[1], "--output", sys.argv[2]]))
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_conversion_that_a_signal_ends_leaves_nothing_that_stays(tmp_path: Path, signum: signal.Signals) -> None:
    source, target = write_model(tmp_path / "hf", "qwen2"), tmp_path / "out" / "m.gguf"
    target.parent.mkdir()
    words = [sys.executable, "-c", STOPS, str(source), str(target)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as running:
        assert running.stdout is not None and running.stdout.readline() == b"writing\n"
        running.send_signal(signum)
        assert running.wait(60) == (-signum if signum == signal.SIGKILL else 130)
    if signum != signal.SIGKILL:
        assert os.listdir(target.parent) == []
    convert(source, target)
    assert os.listdir(target.parent) == ["m.gguf"]
