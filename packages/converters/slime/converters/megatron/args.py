"""Megatron's arguments of a model: parsed from a command line, derived from a Hugging Face config, and compared.

Arguments are dicts by the attribute names of Megatron-LM's `args`; a missing one has Megatron's default.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime.converters.megatron.flags import (
    MegatronSettings,
    by_dest,
    defaults,
    given,
    pattern_text,
    row_of,
    why_refused,
)
from slime.types.errors import ConfigError, InvalidSetting, NotAvailable, counted
from slime.types.settings import Parser, add_flags, build

Config = Mapping[str, Any]

# Arguments that describe a model -> the keys of config.json with the same meaning, as the families read them.
MODEL: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "num_layers"),
    "hidden_size": ("hidden_size",),
    "ffn_hidden_size": ("intermediate_size",),
    "num_attention_heads": ("num_attention_heads",),
    "num_query_groups": ("num_key_value_heads",),
    "group_query_attention": ("num_key_value_heads",),
    "kv_channels": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings",),
    "normalization": ("model_type",),
    "norm_epsilon": ("rms_norm_eps",),
    "swiglu": ("hidden_act",),
    "add_bias_linear": ("mlp_bias", "attention_bias"),
    "add_qkv_bias": ("attention_bias", "qkv_bias"),
    "qk_layernorm": ("use_qk_norm", "model_type"),
    "qk_layernorm_across_heads": ("qk_norm_type", "model_type"),
    "post_self_attn_layernorm": ("model_type",),
    "post_mlp_layernorm": ("model_type",),
    "untie_embeddings_and_output_weights": ("tie_word_embeddings",),
    "rotary_base": ("rope_theta", "rope_parameters"),
    "rotary_percent": ("partial_rotary_factor", "rotary_dim"),
    "rotary_interleaved": ("model_type",),
    "rotary_seq_len_interpolation_factor": ("rope_scaling",),
    "use_rope_scaling": ("rope_scaling", "rope_parameters"),
    "rope_scaling_factor": ("rope_scaling", "rope_parameters"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "moe_layer_freq": ("first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers"),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "moe_router_topk": ("num_experts_per_tok",),
    "moe_router_score_function": ("scoring_func", "model_type"),
    "moe_router_pre_softmax": ("norm_topk_prob",),
    "moe_router_enable_expert_bias": ("topk_method", "model_type"),
    "moe_router_topk_scaling_factor": ("routed_scaling_factor",),
    "moe_router_num_groups": ("n_group",),
    "moe_router_group_topk": ("topk_group",),
    "moe_shared_expert_intermediate_size": ("n_shared_experts", "moe_intermediate_size"),
    "multi_latent_attention": ("kv_lora_rank",),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_head_dim": ("qk_nope_head_dim",),
    "qk_pos_emb_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
    "rope_type": ("rope_scaling",),
    "rotary_scaling_factor": ("rope_scaling",),
    "original_max_position_embeddings": ("rope_scaling",),
    "beta_fast": ("rope_scaling",),
    "beta_slow": ("rope_scaling",),
    "mscale": ("rope_scaling",),
    "mscale_all_dim": ("rope_scaling",),
    "dsa_indexer_n_heads": ("index_n_heads",),
    "dsa_indexer_head_dim": ("index_head_dim",),
    "dsa_indexer_topk": ("index_topk",),
    "mtp_num_layers": ("num_nextn_predict_layers",),
    "attention_output_gate": ("model_type",),
    "apply_layernorm_1p": ("model_type",),
    "moe_shared_expert_gate": ("model_type",),
    "linear_attention_freq": ("layer_types", "full_attention_interval"),
    "linear_conv_kernel_dim": ("linear_conv_kernel_dim",),
    "linear_key_head_dim": ("linear_key_head_dim",),
    "linear_value_head_dim": ("linear_value_head_dim",),
    "linear_num_key_heads": ("linear_num_key_heads",),
    "linear_num_value_heads": ("linear_num_value_heads",),
}
# Argument -> the argument without which it has no effect.
ONLY_WITH = {
    **dict.fromkeys(
        ("moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_score_function"), "num_experts"
    ),
    **dict.fromkeys(("moe_router_pre_softmax", "moe_router_num_groups", "moe_router_group_topk"), "num_experts"),
    **dict.fromkeys(
        """kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rotary_scaling_factor rope_type beta_fast beta_slow
        original_max_position_embeddings mscale mscale_all_dim""".split(),
        "multi_latent_attention",
    ),
    "rope_scaling_factor": "use_rope_scaling",
    **dict.fromkeys(
        """linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
        linear_num_value_heads""".split(),
        "linear_attention_freq",
    ),
}
# Allowed in MODEL_ARGS beside the flags of the table.
PRECISION = ("--bf16",)


def parse_model_args(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Takes Megatron's flags out of a command line; returns (their values by attribute, the other words in order).

    Also takes `--bf16`, which model scripts have among MODEL_ARGS. Raises NotAvailable for a Megatron flag that is not
    supported, and the errors of `MegatronSettings`.
    """
    parser = Parser(add_help=False)
    add_flags(parser, MegatronSettings)
    words, rest = [word for word in argv if word not in PRECISION], []
    namespace, unknown = parser.parse_known_args(words)
    for word in unknown:
        flag = word.split("=", 1)[0]
        reason = why_refused(flag) if word.startswith("--") else None
        if reason is not None:
            raise NotAvailable.unavailable(flag, reason)
        rest.append(word)
    values = renamed(given(build(MegatronSettings, vars(namespace))))
    if len(words) < len(argv):
        values["bf16"] = True
    return values, rest


def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments with the flags that have a newer name under that name."""
    values = dict(values)
    if values.pop("use_gated_attention", None):
        values["attention_output_gate"] = True
    return values


def read_model_config(
    directory: str | Path, model_name: str | None = None, *, train_vision: bool | None = None
) -> dict[str, Any]:
    """Reads `directory`/config.json; `model_name` (--model-name) names a family whose `model_type` it gets.

    train_vision: whether what reads images is a part of a Qwen3.5 (--train-vision).

    Raises MissingFile, InvalidFile, and InvalidSetting for a name that matches no family.
    """
    from slime.converters.families import find_family, model_types, read_config
    from slime.converters.families.qwen_gated import with_vision

    config = read_config(directory)
    if model_name is not None:
        try:
            types = find_family({}, model_name=model_name).model_types
        except NotAvailable:
            raise InvalidSetting.one_of("--model-name", sorted(model_types()), got=model_name) from None
        config = config if config.get("model_type") in types else {**config, "model_type": types[0]}
    return with_vision(config) if train_vision else config


@contextmanager
def errors_name_family(directory: str | Path, model_name: str | None) -> Iterator[None]:
    """Prefixes errors with --model-name where it replaces another family of `directory`/config.json."""
    try:
        yield
    except ConfigError as error:
        own = None if model_name is None else read_model_config(directory).get("model_type")
        if own is None or own == read_model_config(directory, model_name)["model_type"]:
            raise
        raise error.at(f"--model-name {model_name} replaces the model_type {own} of config.json") from None


def model_args(config: Config, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the model that `config` describes; `values` from flags take precedence."""
    from slime.converters.families import find_family

    args = find_family(config).arguments(config) | renamed(values)
    if args.pop("recompute_activations", None):
        args.setdefault("recompute_granularity", "selective")
    if args.pop("use_flash_attn", None):
        args.setdefault("attention_backend", "flash")
    if args.pop("use_rotary_position_embeddings", None):
        args["position_embedding_type"] = "rope"
    return args


def check_model_args(values: Mapping[str, Any], config: Config, *, source: str = "config.json") -> None:
    """Raises InvalidSetting with a line for each of `values` that contradicts `config`.

    Flags that do not describe a model pass, and so does a `max_position_embeddings` below the model's, `mtp_num_layers`
    of 0, and group routing over one group where the model has none.
    """
    from slime.converters.families import find_family

    family, values = find_family(config), renamed(values)
    if family.untrained:
        # Layers for multi-token prediction are in its files, not in its config.json, and never train.
        values.pop("mtp_num_layers", None)
    lines = contradictions(values, family.arguments(config), config)
    if lines:
        text = "\n".join(f"  {line}" for line in lines)
        number = counted(len(lines), "of the model's flags differs", "of the model's flags differ")
        raise InvalidSetting(
            f"{number} from {source}:\n{text}",
            field=lines[0].split()[0],
            expected="flags that describe the checkpoint",
        )


def contradictions(values: Mapping[str, Any], model: Mapping[str, Any], config: Config) -> list[str]:
    """Returns a line `--hidden-size 4096: config.json says 2560 (hidden_size)` for each difference from `model`.

    model: the arguments of a family for `config`.
    """
    completed, of_config = _complete(values, model), _complete(model, model)
    lines = []
    for name in MODEL:
        if name not in values or _agree(name, completed[name], of_config[name], completed, of_config):
            continue
        keys = [f"{key} = {_shown(config[key])}" for key in MODEL[name] if key in config]
        lines.append(
            f"{_as_flag(name, values[name])}: config.json says {_text(name, of_config[name])}"
            + (f" ({', '.join(keys)})" if keys else "")
        )
    padded = values.get("padded_vocab_size")
    if padded is not None and padded < model.get("vocab_size", 0):
        lines.append(f"--padded-vocab-size {padded}: config.json says vocab_size = {model['vocab_size']}")
    return lines


def _complete(args: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `args` with Megatron's defaults and the values that Megatron derives from the model's sizes."""
    full = defaults() | dict(args)
    sized = defaults() | dict(model) | {k: v for k, v in args.items() if v is not None}
    heads = sized["num_attention_heads"] or 1
    if "num_query_groups" in args:
        full["group_query_attention"] = full["num_query_groups"] != heads
    else:
        full["num_query_groups"] = heads
    if args.get("kv_channels") is None and sized["hidden_size"]:
        full["kv_channels"] = sized["hidden_size"] // heads
    if args.get("moe_ffn_hidden_size") is None:
        full["moe_ffn_hidden_size"] = sized["ffn_hidden_size"]
    freq = full["moe_layer_freq"]
    if isinstance(freq, int):
        full["moe_layer_freq"] = [int(i % freq == 0) for i in range(sized["num_layers"] or 0)]
    every = full["linear_attention_freq"]
    if isinstance(every, int):
        full["linear_attention_freq"] = [int((i + 1) % every > 0) for i in range(sized["num_layers"] or 0)]
    full["mtp_num_layers"] = full["mtp_num_layers"] or 0
    if (full["moe_router_num_groups"] or 1) == 1:
        full["moe_router_num_groups"] = full["moe_router_group_topk"] = None
    full["moe_router_topk_scaling_factor"] = full["moe_router_topk_scaling_factor"] or 1.0
    return full


def _agree(name: str, a: Any, b: Any, completed: Mapping[str, Any], of_config: Mapping[str, Any]) -> bool:
    other = ONLY_WITH.get(name)
    if other is not None and not of_config[other] and not completed.get(other):
        return True
    if name == "max_position_embeddings":
        return b is None or a <= b
    if name == "mtp_num_layers":
        return a <= b
    if name == "moe_router_pre_softmax":
        # Sigmoid scores are the same before and after the choice of experts.
        return of_config["moe_router_score_function"] == "sigmoid" or a == b
    if (
        name in ("mscale", "mscale_all_dim")
        and completed["rotary_scaling_factor"] == of_config["rotary_scaling_factor"] == 1
    ):
        # Both multiply log(factor), which is 0 here.
        return True
    # Latent attention has matrices of its own, which these do not describe.
    if name in ("add_qkv_bias", "group_query_attention", "kv_channels") and of_config["multi_latent_attention"]:
        return True
    if name == "num_query_groups" and of_config["multi_latent_attention"]:
        return a in (b, of_config["num_attention_heads"])
    if isinstance(a, float) or isinstance(b, float):
        return a is not None and b is not None and math.isclose(a, b, rel_tol=1e-9)
    return bool(a == b)


def padded_vocab_size(args: Mapping[str, Any]) -> int:
    """Returns the rows of the embedding: `padded_vocab_size`, or the vocabulary rounded up as Megatron does.

    Raises InvalidSetting if the tensor-parallel size does not divide the rows, or the vocabulary has more.
    """
    parts = args.get("tensor_model_parallel_size") or 1
    rows, size = args.get("padded_vocab_size"), args.get("vocab_size")
    if rows is None:
        if size is None:
            raise InvalidSetting.required("--vocab-size", "or --padded-vocab-size")
        multiple = (args.get("make_vocab_size_divisible_by") or 128) * parts
        return -(-size // multiple) * multiple
    if rows % parts:
        raise InvalidSetting.must_be(
            "--padded-vocab-size", f"a multiple of --tensor-model-parallel-size {parts}", got=rows
        )
    if size is not None and rows < size:
        raise InvalidSetting.must_be("--padded-vocab-size", f"at least --vocab-size {size}", got=rows)
    return int(rows)


def render_flags(args: Mapping[str, Any]) -> list[str]:
    """Returns the command line that sets `args`, in the order of the table; None and switches that are off set nothing.

    Raises InvalidSetting for an attribute without a flag.
    """
    for name in args:
        row_of(name)
    words: list[str] = []
    for name in by_dest():
        if name in args:
            words += _words(name, args[name])
    return words


def _words(name: str, value: Any) -> list[str]:
    row = row_of(name)
    if value is None or (row.kind in ("on", "off") and value is not (row.kind == "on")):
        return []
    if row.kind in ("on", "off"):
        return [row.flag]
    if row.kind == "pattern":
        return [row.flag, pattern_text(value)]
    items = value if isinstance(value, list | tuple) else [value]
    return [row.flag, *(_shown(item) for item in items)]


def _shown(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) >= 1000 else str(value)


def _as_flag(name: str, value: Any) -> str:
    return " ".join(_words(name, value)) or f"{name} = {value}"


def _text(name: str, value: Any) -> str:
    row = row_of(name)
    if row.kind in ("on", "off"):
        return f"no {row.flag}" if value is not (row.kind == "on") else row.flag
    if row.kind == "pattern" and value is not None:
        return pattern_text(value)
    return "none" if value is None else _shown(value)
