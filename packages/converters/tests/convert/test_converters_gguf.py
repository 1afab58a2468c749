"""A GGUF file made on the spot by llama.cpp's writer comes out as the transformers model that it was made from."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from slime.converters.cli import main
from slime.converters.convert import gguf_to_hf as converter
from slime.converters.files.safetensors_dir import SafetensorsDir
from slime.converters.inspection.verify import compare
from slime.types.errors import InvalidFile, InvalidSetting, MissingFile, NotAvailable, OutOfSpace

HEADS, KV_HEADS, HIDDEN, LAYERS = 4, 2, 64, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def vocabulary() -> list[str]:
    return [*SPECIAL, *bytes_to_unicode().values(), "Ġa"]


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary()), hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=128, rope_theta=10000.0,
        rms_norm_eps=1e-5, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def to_gguf_layout(name: str, weight: np.ndarray) -> np.ndarray:
    # llama.cpp rotates neighbouring pairs, transformers the two halves of a head.
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name)
    if heads is None:
        return weight
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: LlamaForCausalLM, *, architecture: str = "llama", quantized: bool = False) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    config = model.config
    writer.add_name("Tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(tokens) - len(SPECIAL))
    )
    writer.add_token_merges(["Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)

    def add(name: str, weight: torch.Tensor) -> None:
        data = to_gguf_layout(name.split(".")[-2], weight.detach().numpy())
        if quantized and data.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)

    weights = model.state_dict()
    add("token_embd.weight", weights["model.embed_tokens.weight"])
    add("output_norm.weight", weights["model.norm.weight"])
    for layer in range(LAYERS):
        for theirs, name in GGUF_NAMES.items():
            add(f"blk.{layer}.{name}.weight", weights[f"model.layers.{layer}.{theirs}.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_model()


@pytest.fixture(scope="module")
def source(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model)


def test_weights_survive_bit_for_bit(source: Path, model: LlamaForCausalLM, tmp_path: Path) -> None:
    said: list[str] = []
    target = converter.convert(source, tmp_path / "deep" / "hf", progress=said.append)
    model.save_pretrained(tmp_path / "original")
    assert list(compare(target, tmp_path / "original")) == []
    loaded = AutoModelForCausalLM.from_pretrained(target)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    assert any("dequantising" in text for text in said)
    assert sorted(path.name for path in target.parent.iterdir()) == ["hf"]


def test_tokenizer_and_generation_settings(source: Path, tmp_path: Path) -> None:
    target = converter.convert(source, tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert tokenizer.padding_side == "left" and tokenizer.model_max_length == 128
    text = "<|im_start|>user\nis a b?<|im_end|>\n"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "is a b?"}], tokenize=False) == text
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer(text).input_ids[0] == 1
    generation = json.loads((target / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (1, 2, 2)
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "float32"
    assert "quantization_config" not in config and "_model_name_or_path" not in config


def test_quantised_file_to_bfloat16(model: LlamaForCausalLM, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "q8.gguf", model, quantized=True)
    target = converter.convert(source, tmp_path / "hf", dtype="bfloat16")
    assert {tensor.dtype for tensor in SafetensorsDir(target).tensors.values()} == {"BF16"}
    model.save_pretrained(tmp_path / "original")
    assert list(compare(target, tmp_path / "original", atol=0.01)) == []
    assert list(compare(target, tmp_path / "original")) != []


def test_a_complete_directory_is_kept(source: Path, tmp_path: Path) -> None:
    target = converter.convert(source, tmp_path / "hf")
    before = (target / "model.safetensors").stat()
    converter.convert(source, target)
    after = (target / "model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    with pytest.raises(InvalidSetting, match="bfloat16 cannot be used together: the directory holds float32 weights"):
        converter.convert(source, target, dtype="bfloat16")
    (target / "tokenizer.json").unlink()
    with pytest.raises(InvalidSetting, match="no tokenizer.json"):
        converter.convert(source, target)


def test_what_is_not_a_usable_gguf(source: Path, model: LlamaForCausalLM, tmp_path: Path) -> None:
    target = tmp_path / "hf"
    with pytest.raises(MissingFile, match="no such file"):
        converter.convert(tmp_path / "none.gguf", target)
    text = tmp_path / "text.gguf"
    text.write_text("hello")
    with pytest.raises(InvalidFile, match="--gguf: /dev/null is a device, expected a regular file"):
        converter.convert("/dev/null", target)
    with pytest.raises(InvalidFile, match="not a GGUF file"):
        converter.convert(text, target)
    whole = source.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (4, 40, 3000, len(whole) // 2, len(whole) - 4):
        cut.write_bytes(whole[:length])
        with pytest.raises(InvalidFile, match="cut"):
            converter.convert(cut, target)
    with pytest.raises(NotAvailable, match="'clip'"):
        converter.convert(write_gguf(tmp_path / "clip.gguf", model, architecture="clip"), target)
    with pytest.raises(InvalidSetting, match="--dtype"):
        converter.convert(source, target, dtype="int8")
    assert not target.exists()


def test_full_disk_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(OutOfSpace, match="needed"):
            converter.convert(source, tmp_path / "hf")

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OutOfSpace, match="no space left"):
        converter.convert(source, tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


def test_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "hf")
    assert main(["gguf-to-hf", "--gguf", str(source), "--output-dir", target]) == 0
    assert "reading the tokenizer" in capsys.readouterr().err
    assert main(["gguf-to-hf", "--gguf", str(tmp_path / "none"), "--output-dir", target + "2"]) == 2
    assert "slime-convert: error: --gguf: no such file" in capsys.readouterr().err
    assert main(["gguf-to-hf", "--gguf", str(source)]) == 2
    assert "--output-dir is required" in capsys.readouterr().err


def test_a_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    class Counted(gguf.GGUFReader):
        def __init__(self, path: str) -> None:
            parsed.append(path)
            super().__init__(path)

    tables: list[tuple[object, ...]] = []
    table = gguf.get_tensor_name_map
    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    monkeypatch.setattr(gguf, "get_tensor_name_map", lambda *shape: tables.append(shape) or table(*shape))
    source = write_gguf(tmp_path / "model.gguf", tiny_model())
    converter.convert(source, tmp_path / "model")
    assert parsed == [str(source)] and len(tables) == 1
    assert gguf.GGUFReader is Counted, "the library is as it was"
