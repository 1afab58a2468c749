"""Generates responses token in, token out: makes requests of samples, and appends the answers to the samples."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from slime.rollout.calls.call import CALL
from slime.rollout.engines.streams import first_tokens
from slime.rollout.fleet.fleet import GOES_ON
from slime.rollout.fleet.member import Member
from slime.rollout.generate.responses import trim
from slime.rollout.generate.seeds import SEEDS, sampling_seed
from slime.rollout.generate.state import RolloutState, state_of
from slime.rollout.settings.plugin_args import RolloutArgs
from slime.types import Sample
from slime.types.errors import DeadlineExceeded, EngineError, InvalidField, SlimeError

FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
# Reasons for which a prompt is left out.
TOO_LONG = "prompt_too_long"
UNUSABLE = "prompt_unusable"


@dataclass
class Request:
    """The request of one sample to an engine."""

    sample: Sample
    input_ids: list[int]
    sampling_params: dict[str, Any]
    rid: str
    # Data URIs. `input_ids` has one placeholder for each; `num_prompt_tokens` counts the tokens that the engine makes
    # of prompt and images.
    images: list[str] = field(default_factory=list)
    num_prompt_tokens: int | None = None
    # (tokens, characters) of the response when the request was first sent; None until it is interrupted.
    begun: tuple[int, int] | None = None


async def refusal(
    state: RolloutState, sample: Sample, limit: int | None, context: int | None, *, in_thread: bool = True
) -> tuple[str, SlimeError] | None:
    """Returns (reason, error) for a prompt that cannot be used, otherwise None.

    limit: the most tokens that a setting allows. A custom generate function may rewrite its prompt, so that only this
    limits it. context: the longest sequence of the model. in_thread: whether texts are encoded in a thread, too, which
    takes longer than the encoding and lets others have their turn.
    """
    custom = state.plugins.generate is not None
    if custom and limit is None:
        return None
    try:
        length = await _prompt_length(state, sample, in_thread)
    except (InvalidField, DeadlineExceeded) as error:
        return UNUSABLE, error
    if not length:
        return UNUSABLE, InvalidField("prompt", sample.prompt, "a prompt that has tokens")
    if limit is not None and length > limit:
        return TOO_LONG, InvalidField("prompt", f"{length} tokens", f"at most {limit}")
    if not custom and context is not None and length >= context:
        return TOO_LONG, prompt_too_long(sample, length, context)
    return None


async def _prompt_length(state: RolloutState, sample: Sample, in_thread: bool) -> int:
    """Returns the number of prompt tokens. Raises InvalidField for a prompt that cannot be rendered, DeadlineExceeded
    for a chat template that does not end."""
    tokens = sample.array("tokens")
    if len(tokens):
        return len(tokens) - sample.response_length
    await state.prompts.prepare([sample])
    if in_thread or sample.multimodal_inputs:
        return len(await asyncio.to_thread(state.prompts.encode, sample))
    return len(state.prompts.encode(sample))


def make_request(
    state: RolloutState,
    sample: Sample,
    sampling_params: dict[str, Any],
    *,
    evaluation: bool = False,
    next_turn: bool = False,
) -> Request | None:
    """Returns the request for the rest of a sample's response; None for a finished sample, and for one whose token
    budget is spent, which becomes TRUNCATED.

    next_turn: the response so far was generated in this iteration.
    Raises InvalidField for a prompt that does not fit the context.
    """
    if sample.status in FINISHED:
        return None
    state.prompts.render([sample])
    if not len(sample.array("tokens")):
        sample.tokens = state.prompts.encode(sample)  # type: ignore[assignment]
    is_continued = sample.response_length > 0 and not evaluation and not next_turn
    if is_continued and state.args.mask_offpolicy_in_partial_rollout:
        sample.loss_mask = np.zeros(sample.response_length, np.uint8)  # type: ignore[assignment]
    budget = int(sampling_params["max_new_tokens"]) - sample.response_length
    limit = state.args.eval_max_context_len if evaluation else None
    limit = limit or state.context_len
    if limit is not None:
        prompt_length = len(sample.array("tokens")) - sample.response_length
        if prompt_length >= limit:
            raise prompt_too_long(sample, prompt_length, limit)
        budget = min(budget, limit - len(sample.array("tokens")))
    if budget <= 0:
        sample.status = Sample.Status.TRUNCATED
        return None
    params = sampling_params | {"max_new_tokens": budget}
    if state.seeded and "sampling_seed" not in params:
        seeds = SEEDS.get()
        params["sampling_seed"] = (
            sampling_seed(state.args.rollout_seed, sample.index) if seeds is None else seeds.next(sample.index)
        )
    request = Request(sample, sample.array("tokens").tolist(), params, uuid.uuid4().hex)
    if sample.multimodal_inputs:
        prompt = state.prompts.with_media(sample)
        sample.multimodal_train_inputs, sample.multimodal_train_input_id = prompt.train_inputs, prompt.input_id
        request.num_prompt_tokens = len(request.input_ids)
        request.input_ids = [*prompt.placeholders, *request.input_ids[len(prompt.tokens) :]]
        request.images = prompt.images
    return request


def prompt_too_long(sample: Sample, length: int, limit: int) -> InvalidField:
    return InvalidField(
        "prompt",
        length,
        f"less than {limit}",
        f"the prompt of group {sample.group_index} has {length} tokens, expected less than {limit} (the context); "
        "give --rollout-max-prompt-len to reject such prompts",
    )


async def send(
    state: RolloutState, requests: Sequence[Request], *, session_id: str | None = None, member: Member | None = None
) -> None:
    """Sends `requests` in one call of /generate and appends the answers to their samples.

    Requests that a weight update or the loss of an engine interrupts are sent again for the rest of their responses.
    """
    with_images = [request for request in requests if request.images]
    if 0 < len(with_images) < len(requests):
        # The engines take a batch in which either all prompts have images or none has.
        await send(state, with_images, session_id=session_id, member=member)
        await send(state, [r for r in requests if not r.images], session_id=session_id, member=member)
        return
    left = list(requests)
    while left:
        outputs = await _send_once(state, left, session_id, member)
        interrupted = []
        for request, output in zip(left, outputs, strict=True):
            _check_prompt(request, output)
            _mask_older(state, request, output)
            if _reason(output) in GOES_ON:
                interrupted.append(_go_on(state, request, output))
                continue
            if "text" not in output:
                output["text"] = response_text(state, request, output)
            append_output(state.args, request.sample, output)
            if request.begun is not None:
                _join_texts(state, request)
            trim(state, request.sample)
        left = interrupted


async def _send_once(
    state: RolloutState, requests: Sequence[Request], session_id: str | None, member: Member | None
) -> list[dict[str, Any]]:
    call = CALL.get()
    rids = [request.rid for request in requests]
    if call is not None:
        call.open_requests.update(rids)
    try:
        return await state.fleet.generate(
            [request.input_ids for request in requests],
            [request.sampling_params for request in requests],
            rids=rids,
            images=[request.images for request in requests],
            session_id=session_id,
            member=member,
        )
    finally:
        if call is not None:
            call.open_requests.difference_update(rids)


def _reason(output: dict[str, Any]) -> Any:
    reason = (output.get("meta_info") or {}).get("finish_reason")
    return reason.get("type") if isinstance(reason, dict) else reason


def _go_on(state: RolloutState, request: Request, output: dict[str, Any]) -> Request:
    """Appends the tokens of an interrupted request, and returns the request for the rest."""
    sample = request.sample
    output = first_tokens(output, _num_kept(state, request, output))
    begun = request.begun or (sample.response_length, len(sample.response))
    if tokens := output["output_ids"]:
        # `_join_texts` adds the text.
        append_tokens(state.args, sample, output)
    params = dict(request.sampling_params)
    for limit in ("max_new_tokens", "min_new_tokens"):
        if params.get(limit) is not None:
            params[limit] = max(0, params[limit] - len(tokens))
    counted = request.num_prompt_tokens
    return replace(
        request,
        input_ids=[*request.input_ids, *tokens],
        sampling_params=params,
        rid=uuid.uuid4().hex,
        num_prompt_tokens=None if counted is None else counted + len(tokens),
        begun=begun,
    )


def _num_kept(state: RolloutState, request: Request, output: dict[str, Any]) -> int:
    """Returns the number of tokens from which an interrupted request continues.

    At least one is left to generate. Tokens that may begin a stop string are left out: the engine looks for one only in
    what it generates itself.
    """
    tokens = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
    kept = min(len(tokens), int(request.sampling_params["max_new_tokens"]) - 1)
    stops = request.sampling_params.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    # A token has at least one byte.
    longest = max((len(stop.encode()) for stop in stops), default=0)
    beginnings = tuple(stop[:length] for stop in stops for length in range(1, len(stop)))
    while kept and beginnings:
        tail = state.tokenizer.decode(tokens[max(0, kept - longest) : kept], skip_special_tokens=False)
        if not str(tail).endswith(beginnings):
            break
        kept -= 1
    return kept


def _mask_older(state: RolloutState, request: Request, output: dict[str, Any]) -> None:
    """Masks the tokens so far under --mask-offpolicy-in-partial-rollout, where other weights continue them."""
    sample, version = request.sample, (output.get("meta_info") or {}).get("weight_version")
    if state.args.mask_offpolicy_in_partial_rollout and request.begun is not None and version is not None:
        if sample.spans and sample.spans[-1].weight_version != str(version):
            sample.loss_mask = np.zeros(sample.response_length, np.uint8)  # type: ignore[assignment]


def _join_texts(state: RolloutState, request: Request) -> None:
    """Decodes the tokens of all parts again as one text: a character may be split between two parts."""
    assert request.begun is not None
    sample, (num_tokens, num_characters) = request.sample, request.begun
    tokens = sample.array("tokens")[len(sample.array("tokens")) - sample.response_length + num_tokens :]
    skip = bool(request.sampling_params.get("skip_special_tokens", True))
    text = str(state.tokenizer.decode(tokens.tolist(), skip_special_tokens=skip))
    sample.response = sample.response[:num_characters] + text


def _check_prompt(request: Request, output: dict[str, Any]) -> None:
    """Raises EngineError for a prompt that the engine tokenized differently: its log-probs are not the sample's."""
    wanted, counted = request.num_prompt_tokens, (output.get("meta_info") or {}).get("prompt_tokens")
    if wanted is not None and counted not in (wanted, None, 0):
        raise EngineError(
            f"an engine counted {counted} tokens in a prompt with images ({len(request.images)}), and the processor of "
            f"--hf-checkpoint counts {wanted}: the engine uses another processor, or other settings of it",
            field="prompt_tokens", value=counted, expected=str(wanted),
        )  # fmt: skip


def response_text(state: RolloutState, request: Request, output: dict[str, Any]) -> str:
    """Returns the text of an answer whose engine has no tokenizer (--sglang-skip-tokenizer-init)."""
    skip = bool(request.sampling_params.get("skip_special_tokens", True))
    return str(state.tokenizer.decode(output.get("output_ids") or [], skip_special_tokens=skip))


def append_output(args: RolloutArgs, sample: Sample, output: dict[str, Any]) -> None:
    """Appends one answer of an engine: its tokens, log-probs, text, weight version and finish reason."""
    try:
        meta = output["meta_info"]
        logprobs = meta["output_token_logprobs"]
    except (KeyError, TypeError):
        raise EngineError(
            f"an engine answered without meta_info.output_token_logprobs: {str(output)[:200]}",
            field="output_token_logprobs",
        ) from None
    if getattr(args, "use_rollout_routing_replay", False) and logprobs and meta.get("routed_experts") is None:
        raise EngineError(
            "an engine answered without meta_info.routed_experts, which --use-rollout-routing-replay requires",
            field="routed_experts",
        )
    append_tokens(args, sample, output)
    if sample.status is Sample.Status.PENDING:
        reason = meta.get("finish_reason")
        raise EngineError(
            f"an engine ended a request with the finish_reason {reason!r}, expected stop, length or abort",
            field="finish_reason", value=reason, expected="stop, length or abort",
        )  # fmt: skip


def append_tokens(args: RolloutArgs, sample: Sample, output: dict[str, Any]) -> None:
    meta = output["meta_info"]
    sample.append_response_tokens(
        args,
        tokens=[item[1] for item in meta["output_token_logprobs"]],
        log_probs=[item[0] for item in meta["output_token_logprobs"]],
        meta_info=meta,
        text=output.get("text", ""),
    )


async def generate(
    args: RolloutArgs, sample: Sample, sampling_params: dict[str, Any], *, next_turn: bool = False
) -> Sample:
    """Generates one sample: the default that `--custom-generate-function-path` replaces.

    next_turn: earlier turns of this call generated the response so far; --mask-offpolicy-in-partial-rollout does not
    mask it.
    """
    return await generate_sample(state_of(args), sample, sampling_params, next_turn=next_turn)


async def generate_sample(
    state: RolloutState, sample: Sample, sampling_params: dict[str, Any], *, next_turn: bool = False
) -> Sample:
    """Generates the rest of the response of `sample`, in place; parameters as those of `generate`."""
    await state.prompts.prepare([sample])
    if sample.multimodal_inputs:
        request = await asyncio.to_thread(make_request, state, sample, sampling_params, next_turn=next_turn)
    else:
        request = make_request(state, sample, sampling_params, next_turn=next_turn)
    if request is not None:
        await send(state, [request], session_id=sample.session_id)
    return sample
