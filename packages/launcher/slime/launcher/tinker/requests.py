"""Requests of the SDK: protobuf and JSON in, checked Python values out."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from slime.launcher.tinker import messages
from slime.types.errors import InvalidField, NotAvailable, counted

_DTYPES: dict[int, np.dtype[Any]] = {
    messages.FLOAT32: np.dtype("<f4"),
    messages.INT64: np.dtype("<i8"),
    messages.INT32: np.dtype("<i4"),
}


@dataclass(frozen=True)
class Datum:
    """A sequence to learn from. tokens, targets: int64 [N]; inputs: the inputs of the loss by name, float32 [N]."""

    tokens: np.ndarray
    targets: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class PassRequest:
    """One `forward_backward`, or `forward`."""

    data: Sequence[Datum]
    loss_fn: str
    config: Mapping[str, float | str]
    forward_only: bool


@dataclass(frozen=True)
class Adam:
    """Parameters of an optimizer step, under the names and with the defaults of the SDK."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class Sampling:
    """A prompt to continue. params: the engine's sampling parameters; seed: of the first sample."""

    prompt: list[int]
    num_samples: int
    params: Mapping[str, Any]
    seed: int | None
    prompt_logprobs: bool


def decode_pass(body: bytes) -> Any:
    """Decodes a ForwardBackwardRequest. Raises InvalidField."""
    try:
        request = messages.ForwardBackwardRequest.FromString(body)
    except DecodeError:
        raise InvalidField("body", counted(len(body), "byte"), "a ForwardBackwardRequest in protobuf") from None
    if not request.model_id or request.seq_id < 1:
        raise InvalidField("seq_id", request.seq_id, "model_id, and a seq_id of at least 1")
    return request


def read_pass(request: Any, vocab_size: int, most_tokens: int) -> PassRequest:
    """Reads the data of a pass. most_tokens: limit per sequence. Raises NotAvailable, InvalidField naming the datum."""
    if not request.data:
        raise InvalidField("data", "nothing", "at least one datum")
    config: dict[str, float | str] = dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        config[name] = value.text if value.HasField("text") else value.number
    data = [_datum(f"data[{i}]", datum, vocab_size, most_tokens) for i, datum in enumerate(request.data)]
    return PassRequest(data, request.loss_fn, config, request.forward_only)


def _datum(where: str, datum: Any, vocab_size: int, most_tokens: int) -> Datum:
    parts = []
    for chunk in datum.model_input:
        if chunk.HasField("image") or chunk.HasField("dmel"):
            raise NotAvailable.unavailable(f"{where}.model_input with images or audio", "this service trains on text")
        parts.append(_array(f"{where}.model_input", chunk.encoded_text.tokens, np.dtype("<i4")).astype(np.int64))
    tokens = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    if not 1 <= len(tokens) <= most_tokens:
        raise InvalidField(f"{where}.model_input", counted(len(tokens), "token"), f"1 to {most_tokens} tokens")
    _check_tokens(f"{where}.model_input", tokens, vocab_size)
    inputs = {name: _tensor(f"{where}.{name}", tensor, len(tokens)) for name, tensor in datum.loss_fn_inputs.items()}
    targets = inputs.pop("target_tokens", None)
    if targets is None or targets.dtype.kind != "i":
        raise InvalidField(f"{where}.target_tokens", "none" if targets is None else "floats", "int64 token ids")
    _check_tokens(f"{where}.target_tokens", targets, vocab_size)
    floats = {name: values.astype(np.float32) for name, values in inputs.items()}
    for name, values in floats.items():
        if not np.isfinite(values).all():
            raise InvalidField(f"{where}.{name}", "infinite or not a number", "finite numbers")
    return Datum(tokens, targets.astype(np.int64), floats)


def _tensor(where: str, tensor: Any, length: int) -> np.ndarray:
    if tensor.HasField("sparse_csr") or len(tensor.shape) > 1:
        raise NotAvailable.unavailable(f"{where} of several dimensions", "every token has one target here")
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidField(f"{where}.dtype", tensor.dtype, "float32 or int64")
    values = _array(where, tensor.dense, dtype)
    if len(values) != length or (tensor.shape and list(tensor.shape) != [length]):
        raise InvalidField(where, counted(len(values), "value"), f"{length}, one for each token of model_input")
    return values


def _array(where: str, content: bytes, dtype: np.dtype[Any]) -> np.ndarray:
    if len(content) % dtype.itemsize:
        raise InvalidField(where, counted(len(content), "byte"), f"whole numbers of {dtype.itemsize} bytes")
    return np.frombuffer(content, dtype=dtype)


def _check_tokens(where: str, tokens: np.ndarray, vocab_size: int) -> None:
    outside = (tokens < 0) | (tokens >= vocab_size)
    if outside.any():
        raise InvalidField(where, int(tokens[outside][0]), f"token ids from 0 to {vocab_size - 1}")


def number(body: Mapping[str, Any], name: str, low: float, default: float, where: str = "") -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= sys.float_info.max:
        raise InvalidField(f"{where}{name}", value, f"a number, at least {low:g}")
    return float(value)


def integer(body: Mapping[str, Any], name: str, low: int, default: int | None = None) -> int:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise InvalidField(name, value, f"an integer, at least {low}")
    return value


def text(body: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = body.get(name)
    value = default if value is None else value
    if not isinstance(value, str) or not 0 < len(value) <= 4096:
        raise InvalidField(name, value, "a text")
    return value


# With an eps that is 0 in float32, the update of a weight that never had a gradient would be 0 / 0.
SMALLEST_EPS = 1e-30


def read_adam(body: Mapping[str, Any]) -> Adam:
    """Reads the parameters of an optimizer step. Raises InvalidField, NotAvailable for another optimizer."""
    if body.get("optimizer_params") is not None:
        raise NotAvailable.unavailable("optimizer_params", "the optimizer is AdamW", "AdamParams")
    params = body.get("adam_params")
    if not isinstance(params, dict):
        raise InvalidField("adam_params", params, "the parameters of AdamW")
    known = {field: getattr(Adam, field) for field in Adam.__dataclass_fields__}
    for name in params:
        if name not in known:
            raise InvalidField(f"adam_params.{name}", params[name], f"nothing: known are {', '.join(known)}")
    adam = Adam(
        **{
            name: number(params, name, SMALLEST_EPS if name == "eps" else 0.0, default, "adam_params.")
            for name, default in known.items()
        }
    )
    for name in ("beta1", "beta2"):
        if getattr(adam, name) >= 1:
            raise InvalidField(f"adam_params.{name}", getattr(adam, name), "less than 1")
    return adam


# Fields of a SampleRequest that are not supported, with the value that turns each off.
_NOT_SAMPLED = {
    "topk_prompt_logprobs": 0, "topk_sample_logprobs": 0, "target_prompt_logprobs": None, "prompt_alt_tokens_k": 0,
    "prompt_logprobs_last_n": None,
}  # fmt: skip
MOST_SAMPLES = 1024


def read_sampling(body: Mapping[str, Any], context_length: int) -> Sampling:
    """Reads a SampleRequest. Raises InvalidField, NotAvailable."""
    for name, off in _NOT_SAMPLED.items():
        if body.get(name) not in (None, off):
            raise NotAvailable.unavailable(name, "the engine does not compute it")
    if body.get("record_stability_info"):
        raise NotAvailable.unavailable(
            "record_stability_info", "it serves the loss stable_reinforce",
            "loss_fn importance_sampling, ppo or cispo",
        )  # fmt: skip
    count = integer(body, "num_samples", 1, 1)
    if count > MOST_SAMPLES:
        raise InvalidField("num_samples", count, f"at most {MOST_SAMPLES}")
    prompt = _prompt(body.get("prompt"))
    sampling_params = body.get("sampling_params")
    if not isinstance(sampling_params, dict):
        raise InvalidField("sampling_params", sampling_params, "an object")
    most = context_length - len(prompt)
    max_tokens = sampling_params.get("max_tokens")
    params: dict[str, Any] = {
        "max_new_tokens": most if max_tokens is None else integer(sampling_params, "max_tokens", 1),
        "temperature": number(sampling_params, "temperature", 0.0, 1.0, "sampling_params."),
        "top_p": number(sampling_params, "top_p", 0.0, 1.0, "sampling_params."),
        "top_k": integer(sampling_params, "top_k", -1, -1),
        **_stop(sampling_params.get("stop")),
    }
    seed = None if sampling_params.get("seed") is None else integer(sampling_params, "seed", 0)
    if most < 1:
        raise InvalidField("prompt", counted(len(prompt), "token"), f"at most {context_length - 1}")
    return Sampling(prompt, count, params, seed, bool(body.get("prompt_logprobs")))


def _stop(stop: Any) -> dict[str, Any]:
    """Returns the engine's parameters for `stop`: None stops at the end of sequence only, an empty list never."""
    if stop is None:
        return {}
    if isinstance(stop, str):
        return {"stop": [stop]}
    if isinstance(stop, list) and all(isinstance(each, str) for each in stop):
        return {"stop": stop} if stop else {"ignore_eos": True}
    if isinstance(stop, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in stop):
        return {"stop_token_ids": stop}
    raise InvalidField("sampling_params.stop", stop, "a text, texts or token ids")


def _prompt(prompt: Any) -> list[int]:
    chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
    if not isinstance(chunks, list):
        raise InvalidField("prompt", prompt, "an object with chunks")
    token_ids: list[int] = []
    for number, chunk in enumerate(chunks):
        kind = chunk.get("type") if isinstance(chunk, dict) else None
        if kind != "encoded_text":
            raise NotAvailable.unavailable(f"prompt.chunks[{number}] of type {kind}", "this service samples from text")
        tokens = chunk.get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise InvalidField(f"prompt.chunks[{number}].tokens", tokens, "a list of token ids")
        token_ids += tokens
    if not token_ids:
        raise InvalidField("prompt", "no tokens", "at least one token")
    return token_ids
