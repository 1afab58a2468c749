"""The endpoint /generate: parses a JSON body into sequences, and writes SGLang's answers for them."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slime.rollout.chat.template import check_text
from slime.rollout.engines.embedded.model.images import parse_image_data
from slime.rollout.engines.embedded.model.loading import Loaded
from slime.rollout.engines.embedded.model.params import SamplingParams, parse_sampling_params
from slime.rollout.engines.embedded.model.response import Response
from slime.rollout.engines.embedded.model.routing import FLAG
from slime.types.errors import InvalidField, counted
from slime.types.models.vision import images_id

SWITCHES = ("return_logprob", "stream", "incremental", "return_text_in_logprobs", "return_routed_experts",
            "return_top_p_token_ids")  # fmt: skip
KNOWN = ("input_ids", "text", "sampling_params", "rid", "logprob_start_len", "top_logprobs_num", "model", "priority",
         "image_data", *SWITCHES)  # fmt: skip
NOT_HERE = ("audio_data", "video_data", "input_embeds", "lora_path", "return_hidden_states")

MOST_PROMPTS = 1 << 16


def parse_generate(body: Mapping[str, Any], loaded: Loaded) -> tuple[list[Response], bool]:
    """Returns (sequences, whether the request was for a list of prompts). Raises InvalidField."""
    for name, value in body.items():
        if name in NOT_HERE and value:
            raise InvalidField(name, "given", "nothing: the embedded engine takes text and images only")
        if name not in KNOWN and name not in NOT_HERE:
            raise InvalidField(name, value, f"one of {', '.join(KNOWN)}")
        if name in SWITCHES and not (value is None or isinstance(value, bool)):
            raise InvalidField(name, value, "true or false")
    if body.get("return_routed_experts") and loaded.routing is None:
        raise InvalidField("return_routed_experts", True, f"nothing: the engine was started without {FLAG}")
    prompts, batched = _prompts(body, loaded)
    params = _spread("sampling_params", body.get("sampling_params"), len(prompts), Mapping)
    prompt_field = "input_ids" if body.get("text") is None else "text"
    rids = _spread("rid", body.get("rid"), len(prompts), str)
    if len(prompts) > 1 and isinstance(body.get("rid"), str):
        rids = [f"{body['rid']}-{i}" for i in range(len(prompts))]
    images = parse_image_data(body.get("image_data"), len(prompts), batched=batched)
    responses = [
        make_response(
            loaded,
            prompt,
            parse_sampling_params(p),
            rid or uuid.uuid4().hex,
            prompt_field if not batched else f"{prompt_field}[{i}]",
            images[i],
        )
        for i, (prompt, p, rid) in enumerate(zip(prompts, params, rids, strict=True))
    ]
    for response in responses:
        response.records_nuclei = bool(body.get("return_top_p_token_ids"))
    return responses, batched


def make_response(
    loaded: Loaded, prompt: list[int], params: SamplingParams, rid: str, field: str, images: Sequence[bytes] = ()
) -> Response:
    """Returns a sequence whose max_new_tokens is lowered to what the context leaves.

    prompt: token ids. field: names the prompt in errors. images: encoded, each with one placeholder token in `prompt`.
    Raises InvalidField for a prompt that does not fit the vocabulary or the context.
    """
    size = loaded.vocab_size
    if not isinstance(prompt, list) or not prompt or not all(type(t) is int and 0 <= t < size for t in prompt):
        tokens = prompt if isinstance(prompt, list) else [prompt]
        wrong = next((t for t in tokens if not (type(t) is int and 0 <= t < size)), "no tokens")
        raise InvalidField(field, wrong, f"token ids from 0 to {size - 1}")
    outside = [t for t in params.stop_token_ids if not 0 <= t < loaded.vocab_size]
    if outside:
        raise InvalidField("sampling_params.stop_token_ids", outside[0], f"token ids from 0 to {loaded.vocab_size - 1}")
    if params.min_new_tokens and len(params.stop_token_ids | loaded.eos_ids) >= loaded.vocab_size:
        raise InvalidField(
            "sampling_params.stop_token_ids", counted(len(params.stop_token_ids), "token"),
            "fewer than the vocabulary has: min_new_tokens forbids them all",
        )  # fmt: skip
    places: list[int] = []
    media: dict[str, Any] = {}
    if images:
        if loaded.media is None:
            raise InvalidField("image_data", "given", "nothing: the model reads text alone")
        prompt, places, media = loaded.media().expand(prompt, images)
    room = loaded.context_length - len(prompt)
    if room < 1:
        raise InvalidField(
            field, counted(len(prompt), "token"), f"at most {loaded.context_length - 1}",
            f"{field}: the prompt has {len(prompt)} tokens, and the context of the model {loaded.context_length}",
        )  # fmt: skip
    if params.max_new_tokens > room:
        params = replace(params, max_new_tokens=room, min_new_tokens=min(room, params.min_new_tokens))
    response = Response(rid, list(prompt), params)
    if images:
        response.media, response.media_id, response.image_places = media, images_id(images), places
    return response


def _prompts(body: Mapping[str, Any], loaded: Loaded) -> tuple[list[list[int]], bool]:
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise InvalidField("input_ids", "both" if ids is not None else "neither", "input_ids or text, one of them")
    if text is not None:
        texts = text if isinstance(text, list) else [text]
        if not texts or not all(isinstance(t, str) for t in texts):
            raise InvalidField("text", text, "a text or a list of texts")
        for each in texts:
            check_text(each, "text")
        return [loaded.tokenizer(t)["input_ids"] for t in texts], isinstance(text, list)
    if isinstance(ids, list) and len(ids) > MOST_PROMPTS and isinstance(ids[0], list):
        raise InvalidField("input_ids", counted(len(ids), "prompt"), f"at most {MOST_PROMPTS}")
    if not isinstance(ids, list) or not ids:
        raise InvalidField("input_ids", ids, "a list of token ids, or a list of such lists")
    if isinstance(ids[0], list):
        return ids, True
    return [ids], False


def _spread(name: str, value: Any, count: int, kind: Any) -> list[Any]:
    if isinstance(value, list):
        if len(value) != count:
            raise InvalidField(name, f"{len(value)} of them", f"{count}, one for each prompt")
        values = value
    else:
        values = [value] * count
    for item in values:
        if item is not None and not isinstance(item, kind):
            raise InvalidField(name, item, "an object" if kind is Mapping else "a text")
    return values


def response_text(loaded: Loaded, response: Response, length: int) -> str:
    """Returns the text of the first `length` tokens, without the stop string or the end-of-sequence token that ended
    the response."""
    params, ids = response.params, response.output_ids[:length]
    matched = (response.finish_reason or {}).get("matched") if not params.no_stop_trim else None
    if isinstance(matched, int) and ids and ids[-1] == matched:
        ids = ids[:-1]
    text = loaded.tokenizer.decode(
        ids, skip_special_tokens=params.skip_special_tokens, clean_up_tokenization_spaces=False
    )
    if isinstance(matched, str) and matched in text:
        text = text[: text.index(matched)]
    return text


@dataclass(frozen=True)
class StreamPart:
    """A part of a streamed response. incremental: what comes before `tokens` was sent already, and the text comes with
    the last part."""

    tokens: slice
    finished: bool
    incremental: bool


def answer(
    loaded: Loaded, response: Response, *, log_probs: bool, experts: bool = False, part: StreamPart | None = None
) -> dict[str, Any]:
    """Returns a response, or a part of it, in SGLang's form.

    log_probs: whether to include them. experts: whether to include them, as base64 of int32 [tokens - 1, layers, k], of
    prompt and response. Nuclei, where they were recorded, are base64 of int32: the ids of all nuclei one after the
    other, and the offsets at which each begins and the last one ends.
    """
    part = part or StreamPart(slice(0, len(response.log_probs)), True, False)
    tokens = part.tokens
    chosen, ids = response.log_probs[tokens], response.output_ids[tokens]
    meta: dict[str, Any] = {
        "id": response.rid,
        "finish_reason": response.finish_reason if part.finished else None,
        "prompt_tokens": len(response.prompt_ids),
        "completion_tokens": tokens.stop,
        "cached_tokens": response.cached_tokens,
        "num_retractions": response.retractions,
        "weight_version": response.weight_version,
        "e2e_latency": (response.finished or response.started) - response.started,
    }
    if log_probs:
        meta["output_token_logprobs"] = [[value, token, None] for value, token in zip(chosen, ids, strict=True)]
    # A stream of answers so far would repeat all nuclei with every token.
    if (part.finished or part.incremental) and (nuclei := response.nuclei[tokens]):
        bounds = np.cumsum([0, *map(len, nuclei)])
        meta["top_p_token_ids"] = base64.b64encode(np.concatenate(nuclei).astype("<i4").tobytes()).decode()
        meta["top_p_token_offsets"] = base64.b64encode(bounds.astype("<i4").tobytes()).decode()
    if part.finished and experts and response.experts:
        # A sequence that was ended before it ran has no experts.
        rows = np.concatenate(response.experts)[: len(response.prompt_ids) + tokens.stop - 1]
        meta["routed_experts"] = base64.b64encode(rows.astype("<i4").tobytes()).decode()
    text = response_text(loaded, response, tokens.stop) if part.finished or not part.incremental else ""
    return {"text": text, "output_ids": ids, "meta_info": meta}
