"""Checks that the engines can take the trainer's weights: by their transport, as deltas, and quantized."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.converters.convert.quantization_config import quantization_of, updatable
from slime.rollout.engines.kind import EngineKind
from slime.rollout.engines.registry import KINDS
from slime.types.errors import InvalidSetting, NotAvailable
from slime.types.setting_values import flag_name

PLAIN_LAYERS = "--sglang-json-model-override-args '{\"quantization_config\": null}'"


def check_quantization(args: Mapping[str, Any]) -> None:
    """Raises NotAvailable or InvalidSetting for a quantized model whose engines would get weights in another form.

    args: flat. For an engine that is chosen later, the plan calls `refuse_quantized`.
    """
    directory, kind = args["hf_checkpoint"], KINDS.get(args["rollout_engine"])
    if kind is not None and not args["rollout_external_engine_addrs"]:
        refuse_quantized(directory, kind)
    if args["update_weight_quantization"] == "auto":
        updatable(_config(directory), f"--hf-checkpoint {directory}")


def check_plain_layers(args: Mapping[str, Any]) -> None:
    """Raises InvalidSetting if engines would hold the layers of a quantized model in another form than updates have.

    args: flat, with the flags of SGLang's server for these engines.
    """
    directory, quantized = args["hf_checkpoint"], args["update_weight_quantization"] == "auto"
    plain = are_plain(args["sglang_args"].get("json_model_override_args"))
    if args["rollout_external_engine_addrs"] or plain != quantized or quantization_of(_config(directory)) is None:
        return
    if quantized:
        raise InvalidSetting.requires(
            PLAIN_LAYERS, "--update-weight-quantization none",
            f"updates are quantized as config.json of --hf-checkpoint {directory} says",
        )  # fmt: skip
    raise InvalidSetting.requires(
        "--update-weight-quantization none", PLAIN_LAYERS,
        f"engines would put plain weights into the quantized layers of --hf-checkpoint {directory}",
    )  # fmt: skip


def refuse_quantized(directory: str, kind: EngineKind) -> None:
    """Raises NotAvailable if the model in `directory` is quantized and engines of `kind` would not hold it so."""
    quantization = quantization_of(_config(directory))
    if quantization is not None and not kind.holds_quantized:
        raise NotAvailable.conflict(
            f"--hf-checkpoint {directory}", f"--rollout-engine {kind.name}",
            f"its weights are quantized ({quantization.get('quant_method')}), and {kind.title} takes updates of plain "
            "ones only",
        )  # fmt: skip


def are_plain(overrides: Any) -> bool:
    """Tells whether these overrides of config.json leave the engines' weights unquantized."""
    try:
        config = json.loads(overrides or "{}")
    except (TypeError, ValueError):
        return False
    return isinstance(config, dict) and "quantization_config" in config and not config["quantization_config"]


def _config(directory: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    return config


def check_pipeline_stages(args: Mapping[str, Any]) -> None:
    """Raises InvalidSetting for GPU-to-GPU weight updates of engines with pipeline stages, since each stage has its own
    group; `args` is flat."""
    stages, transport = int(args["sglang_args"].get("pp_size") or 1), args["update_weight_transport"]
    if stages > 1 and transport != "disk":
        raise InvalidSetting.requires(
            f"--sglang-pp-size {stages}",
            "--update-weight-transport disk",
            "engines with pipeline stages take weights from a directory only",
        )


def refuse_adapters(args: Mapping[str, Any]) -> None:
    """Raises InvalidSetting for SGLang's flags of LoRA where LoRA trains: engines hold no adapter that they could apply
    to. `args` is flat."""
    if not args["lora_rank"]:
        return
    for name, value in args["sglang_args"].items():
        if value is not False and {"lora", "loras"} & set(name.split("_")):
            raise InvalidSetting.conflict(
                flag_name(f"sglang_{name}"), f"--lora-rank {args['lora_rank']}",
                "engines get merged weights, so leave LoRA in them off",
            )  # fmt: skip


def check_deltas(args: Mapping[str, Any]) -> None:
    """Raises InvalidSetting or NotAvailable for weight deltas that the engines cannot take; `args` is flat. For engines
    that are chosen later, the trainer does."""
    if args["update_weight_local_checkpoint_dir"] is not None and args["rollout_external_engine_addrs"]:
        raise InvalidSetting.conflict(
            "--update-weight-local-checkpoint-dir", "--rollout-external-engine-addrs",
            "only engines that the run has started have the loader that reads this directory",
        )  # fmt: skip
    kind = KINDS.get(args["rollout_engine"])
    if args["update_weight_mode"] != "delta" or kind is None:
        return
    if not kind.delta_carriers:
        raise NotAvailable.conflict(
            "--update-weight-mode delta", f"--rollout-engine {kind.name}", f"{kind.title} takes whole weights only"
        )
    transport = args["update_weight_transport"]
    if transport == "tensor" and "tensor" not in kind.delta_carriers:
        raise InvalidSetting.conflict(
            "--update-weight-transport tensor", f"--rollout-engine {kind.name}",
            f"{kind.title} takes deltas by NCCL or from a disk; leave the flag out, or give nccl or disk",
        )  # fmt: skip
    if transport == "auto" and args["colocate"] and "tensor" not in kind.delta_carriers:
        raise InvalidSetting.requires(
            "--update-weight-mode delta",
            "--update-weight-transport disk, --update-weight-disk-dir and --update-weight-local-checkpoint-dir",
            f"with --colocate {kind.title} shares the trainer's GPUs, and NCCL connects separate ones only",
        )  # fmt: skip
    has_place = args["update_weight_local_checkpoint_dir"] is not None
    if transport == "disk" and "checkpoint" in kind.delta_carriers and not has_place:
        raise InvalidSetting.requires(
            "--update-weight-mode delta", "--update-weight-local-checkpoint-dir DIR",
            f"{kind.title} loads a whole checkpoint, which deltas update in this directory on every engine's host",
        )  # fmt: skip
