"""Megatron's flags as settings: one optional field per flag, None if the flag was not used."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Optional

from slime.converters.megatron.flags.rows import FlagRow
from slime.converters.megatron.flags.table import by_dest, number, pattern, table
from slime.types.errors import InvalidSetting, NotAvailable
from slime.types.settings import setting

_SCALARS: dict[str, Any] = {"int": int, "float": float, "str": str, "number": Any, "pattern": Any}
_PARSERS = {"number": number, "pattern": pattern}
# Type: one value for the whole model, or one for each layer or term.
_SCALAR_OR_LIST = ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "cp_comm_type")
_AT_LEAST_ONE = frozenset(
    """tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
    expert_tensor_parallel_size num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels
    num_experts moe_router_topk moe_ffn_hidden_size vocab_size padded_vocab_size make_vocab_size_divisible_by seq_length
    max_position_embeddings recompute_num_layers num_layers_per_virtual_pipeline_stage
    num_virtual_stages_per_pipeline_rank decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
    q_lora_rank kv_lora_rank qk_head_dim v_head_dim ddp_bucket_size moe_shared_expert_intermediate_size""".split()
)

_NOT_NEGATIVE = frozenset(
    """mtp_num_layers mtp_loss_scaling_factor attention_dropout hidden_dropout norm_epsilon moe_aux_loss_coeff
    moe_z_loss_coeff""".split()
)


def make_settings(rows: Iterable[FlagRow]) -> type:
    """Makes a dataclass with an optional field for each row of the table that slime takes."""
    fields = [_field(row) for row in rows if row.taken]
    cls = dataclasses.make_dataclass(
        "MegatronSettings",
        fields,
        kw_only=True,
        namespace={
            "__doc__": "Megatron, with --train-backend megatron.",
            "__post_init__": lambda self: check_given(given(self)),
        },
    )
    cls.__module__ = __name__  # for pickle and typing.get_type_hints
    return cls


def _field(row: FlagRow) -> tuple[str, Any, Any]:
    name, many = row.kind.rstrip("*"), row.kind.endswith("*")
    names = [flag[2:] for flag in row.flags]
    common: dict[str, Any] = dict(flags=() if names == [row.dest.replace("_", "-")] else names, hidden=True)
    if name in ("on", "off"):
        return row.dest, bool | None, setting(None, row.help, switch=name == "on", **common)
    scalar: Any = _SCALARS[name]
    hint: Any = Optional[list[scalar] if many else scalar]  # noqa: UP045 - the type is known only here
    return (
        row.dest,
        hint,
        setting(
            None,
            row.help,
            choices=row.choices or None,
            parse=_PARSERS.get(name),
            minimum=1 if row.dest in _AT_LEAST_ONE else 0 if row.dest in _NOT_NEGATIVE else None,
            **common,
        ),
    )


def given(settings: Any) -> dict[str, Any]:
    """Returns the settings of a MegatronSettings that are not None, by attribute name of Megatron's `args`."""
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    for name in _SCALAR_OR_LIST:
        value = values.get(name)
        if isinstance(value, list) and len(value) == 1:
            values[name] = value[0]
    if values.get("use_precision_aware_optimizer"):
        # Megatron implements it as a kind of distributed optimizer.
        values["use_distributed_optimizer"] = True
    return {name: value for name, value in values.items() if value is not None}


def check_backend(backend: str, values: Mapping[str, Any]) -> None:
    """Raises InvalidSetting for one of Megatron's flags with another backend."""
    if backend != "megatron" and values:
        raise InvalidSetting.requires(
            _as_typed(values, next(iter(values))), "--train-backend megatron", f"this is --train-backend {backend}"
        )


def refuse_fp8_on_cpu(values: Mapping[str, Any]) -> None:
    """Raises InvalidSetting where Megatron's flags ask for products in FP8 of a trainer without a GPU."""
    if values.get("fp8"):
        raise InvalidSetting.requires(
            f"--fp8-format {values['fp8']}", "a GPU", "Transformer Engine has no kernels for a CPU"
        )


def check_given(values: Mapping[str, Any]) -> None:
    """Raises NotAvailable for an unsupported value, InvalidSetting for values that cannot be used together."""
    rows = by_dest()
    for name, value in values.items():
        row = rows.get(name)
        if row is None or row.status != "same":
            continue
        items = value if isinstance(value, list) else [value]
        if not all(item in row.accepts for item in items):
            accepted = " or ".join(str(item) for item in row.accepts)
            instead = None if isinstance(value, bool) else f"{row.flag} {accepted}"
            raise NotAvailable.unavailable(_as_typed(values, name), row.note, instead)
    _check_conflicts(values)


def _check_conflicts(values: Mapping[str, Any]) -> None:
    for first, second in (
        ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
        ("accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16"),
        ("account_for_embedding_in_pipeline_split", "decoder_first_pipeline_num_layers"),
        ("account_for_loss_in_pipeline_split", "decoder_last_pipeline_num_layers"),
        ("distribute_saved_activations", "sequence_parallel"),
    ):
        if values.get(first) and values.get(second):
            raise InvalidSetting.conflict(_as_typed(values, first), _as_typed(values, second))
    if values.get("overlap_param_gather") and not values.get("use_distributed_optimizer"):
        raise InvalidSetting.requires("--overlap-param-gather", "--use-distributed-optimizer")
    _check_optimizer(values)
    _check_fp8(values)
    granularity = values.get("recompute_granularity")
    if granularity == "full" and not values.get("recompute_method"):
        raise InvalidSetting.requires("--recompute-granularity full", "--recompute-method uniform or block")
    if granularity == "full" and not values.get("recompute_num_layers"):
        raise InvalidSetting.requires("--recompute-granularity full", "--recompute-num-layers")
    if values.get("recompute_method") and granularity != "full":
        raise InvalidSetting.requires(_as_typed(values, "recompute_method"), "--recompute-granularity full")
    seq_length, longest = values.get("seq_length"), values.get("max_position_embeddings")
    if seq_length and longest and seq_length > longest:
        raise InvalidSetting.must_be("--seq-length", f"at most --max-position-embeddings {longest}", got=seq_length)


def _check_optimizer(values: Mapping[str, Any]) -> None:
    offload, precise = values.get("optimizer_cpu_offload"), values.get("use_precision_aware_optimizer")
    if offload and not precise:
        # Otherwise Megatron hands the CPU optimizer tensors that it was not built with.
        raise InvalidSetting.requires("--optimizer-cpu-offload", "--use-precision-aware-optimizer")
    for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if values.get(name, "fp32") == "fp32":
            continue
        if not precise:
            raise InvalidSetting.requires(_as_typed(values, name), "--use-precision-aware-optimizer")
        if offload and name != "main_grads_dtype":
            raise InvalidSetting.conflict(
                _as_typed(values, name), "--optimizer-cpu-offload", "the optimizer on the CPU keeps its states in fp32"
            )


def _check_fp8(values: Mapping[str, Any]) -> None:
    for name, needed in (
        ("fp8_recipe", "fp8"), ("first_last_layers_bf16", "fp8"),
        ("num_layers_at_start_in_bf16", "first_last_layers_bf16"),
        ("num_layers_at_end_in_bf16", "first_last_layers_bf16"),
    ):  # fmt: skip
        if values.get(name) and not values.get(needed):
            raise InvalidSetting.requires(
                _as_typed(values, name), by_dest()[needed].flag + (" FORMAT" if needed == "fp8" else "")
            )
    if not values.get("fp8"):
        return
    recipe = values.get("fp8_recipe")
    recipes = "--fp8-recipe blockwise, tensorwise or mxfp8"
    if recipe is None:
        reason = "Megatron's default, delayed, is not available: it scales by passes that came before"
        raise InvalidSetting.requires(_as_typed(values, "fp8"), recipes, reason)
    if recipe == "delayed":
        reason = "it scales by passes that came before, and log-probs of one policy must come out the same twice"
        raise NotAvailable.unavailable(_as_typed(values, "fp8_recipe"), reason, recipes)
    if recipe == "custom":
        reason = "quantizers of your own"
        raise NotAvailable.unavailable(_as_typed(values, "fp8_recipe"), reason, recipes)
    if values.get("transformer_impl") == "local":
        reason = "only Transformer Engine's layers compute in FP8"
        raise InvalidSetting.conflict(_as_typed(values, "fp8"), _as_typed(values, "transformer_impl"), reason)


def _as_typed(values: Mapping[str, Any], name: str) -> str:
    """Spells a flag with its value as a user types it."""
    flag, value = by_dest()[name].flag, values[name]
    if isinstance(value, bool):
        return flag
    return f"{flag} {' '.join(map(str, value)) if isinstance(value, list) else value}"


MegatronSettings: Any = make_settings(table())
