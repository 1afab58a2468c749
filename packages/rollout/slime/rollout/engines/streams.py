"""Streamed answers: merges the pieces in which an engine sends them, and keeps what it had sent when it is lost.

An engine sends each piece with all tokens so far, or with the new ones only (SGLang that was started with
--incremental-streaming-output, the embedded engine if the request has `incremental`). `completion_tokens` tells which:
it counts all tokens.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from slime.types.errors import EngineError, counted

JSON = dict[str, Any]

PAIRS = "output_token_logprobs"
# The nuclei of all tokens: their ids, and where each begins and the last one ends, in base64 of int32.
NUCLEI = ("top_p_token_ids", "top_p_token_offsets")

# SGLang's own fields: the ids of each token's nucleus, the sampled token's log-prob among them, and their number.
_MASKS, _MASKED_LOG_PROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"
_SGLANG_NUCLEI = frozenset({_MASKS, _MASKED_LOG_PROBS, "output_token_sampling_mask_length"})


class StreamedAnswers:
    """The answers to the prompts of one request, as far as they have arrived. on_output: called with the answer to a
    single prompt whenever it has grown; later pieces change that answer."""

    def __init__(self, prompts: int, on_output: Callable[[JSON], None] | None = None) -> None:
        self._answers: list[_Answer | None] = [None] * prompts
        self._on_output = on_output

    @property
    def begun(self) -> bool:
        """True once a token has arrived."""
        return any(answer is not None and answer.ids for answer in self._answers)

    @property
    def complete(self) -> bool:
        return all(answer is not None and answer.finished for answer in self._answers)

    def add(self, piece: JSON, engine: str) -> None:
        """Merges a piece. Raises EngineError if tokens are missing between it and the pieces before it."""
        index = piece.pop("index", 0)
        if index not in range(len(self._answers)):
            raise EngineError(
                f"engine {engine} streams an answer to prompt {index} of {len(self._answers)}",
                field=engine, value=index, expected=f"an index below {len(self._answers)}",
            )  # fmt: skip
        answer = self._answers[index]
        if answer is None:
            answer = self._answers[index] = _Answer()
        answer.add(piece, engine)
        if self._on_output is not None:
            self._on_output(answer.output())

    def outputs(self) -> list[JSON]:
        """Returns the answers in the order of their prompts. Call it once they are complete."""
        return [answer.output() for answer in self._answers if answer is not None]

    def kept(self, rids: Sequence[str], reason: str) -> list[JSON]:
        """Returns the complete answers, and the others with their tokens so far and the finish reason `reason`.
        rids: the ids of the sequences, or none."""
        outputs = []
        for index, answer in enumerate(self._answers):
            if answer is None:
                answer = _Answer()
                answer.add({"output_ids": [], "meta_info": {"id": rids[index] if rids else "", PAIRS: []}}, "")
            output = answer.output()
            if not answer.finished:
                output = first_tokens(output, len(answer.ids))
                output["meta_info"]["finish_reason"] = {"type": reason}
            outputs.append(output)
        return outputs


class _Answer:
    """The answer to one prompt so far."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.finished = False
        self._pairs: list[Any] = []
        self._text = ""
        # For each piece, the arrays of `NUCLEI`.
        self._nuclei: list[list[np.ndarray]] = []
        self._latest: JSON = {}

    def add(self, piece: JSON, engine: str) -> None:
        piece = with_nuclei(piece, engine)
        meta = piece.get("meta_info") or {}
        pairs = meta.get(PAIRS)
        ids = piece.get("output_ids") or [] if pairs is None else [pair[1] for pair in pairs]
        total = meta.get("completion_tokens") or len(ids)
        # SGLang may include tokens that came after it had counted them.
        if len(ids) >= total:
            self.ids, self._pairs, self._text, self._nuclei = [], [], "", []
        elif len(self.ids) + len(ids) != total:
            raise EngineError(
                f"engine {engine} streams {len(ids)} of {total} tokens after the first {len(self.ids)}",
                field=engine, value=len(ids), expected=f"the {total - len(self.ids)} new ones, or all {total}",
            )  # fmt: skip
        self.ids += ids
        self._pairs += pairs or []
        self._text += piece.get("text") or ""
        if NUCLEI[0] in meta:
            self._nuclei.append([_decoded(meta[name]) for name in NUCLEI])
        self.finished = meta.get("finish_reason") is not None
        self._latest = piece

    def output(self) -> JSON:
        output, meta = dict(self._latest), dict(self._latest.get("meta_info") or {})
        output |= {"output_ids": self.ids, "meta_info": meta}
        if PAIRS in meta:
            meta[PAIRS] = self._pairs
        if "text" in output:
            output["text"] = self._text
        if self._nuclei:
            meta |= _nuclei(self._nuclei)
        return output


def first_tokens(output: Mapping[str, Any], count: int) -> JSON:
    """Returns an unfinished answer with its first `count` tokens only, and without its text and its experts."""
    meta = {name: value for name, value in output["meta_info"].items() if name != "routed_experts"}
    pairs = meta.get(PAIRS, [])[:count]
    meta |= {PAIRS: pairs, "completion_tokens": count}
    if NUCLEI[0] in meta:
        ids, bounds = (_decoded(meta[name]) for name in NUCLEI)
        meta |= _nuclei([[ids[: bounds[count]], bounds[: count + 1]]])
    return {"output_ids": [pair[1] for pair in pairs], "meta_info": meta}


def with_nuclei(answer: JSON, engine: str) -> JSON:
    """Returns an answer, or a piece of one, in which the nuclei that SGLang lists are arrays, and log-probs are over
    them. Raises EngineError if their number is wrong."""
    meta = answer.get("meta_info") or {}
    if _MASKS not in meta:
        return answer
    pairs, masks, log_probs = (meta.get(name) or [] for name in (PAIRS, _MASKS, _MASKED_LOG_PROBS))
    if not len(pairs) == len(masks) == len(log_probs):
        raise EngineError(
            f"engine {engine} returns {counted(len(masks), 'nucleus', 'nuclei')} and "
            f"{counted(len(log_probs), 'log-prob')} over them for {counted(len(pairs), 'token')}",
            field=engine, value=len(masks), expected=str(len(pairs)),
        )  # fmt: skip
    ids = np.fromiter((token for mask in masks for token in mask), "<i4")
    bounds = np.cumsum([0, *map(len, masks)])
    kept = {name: value for name, value in meta.items() if name not in _SGLANG_NUCLEI}
    kept[PAIRS] = [[log_prob, *pair[1:]] for log_prob, pair in zip(log_probs, pairs, strict=True)]
    return answer | {"meta_info": kept | _nuclei([[ids, bounds]])}


def never_sent(rid: str) -> dict[str, Any]:
    """Returns the answer to a request that was aborted before it was sent to an engine."""
    reason = {"type": "abort", "message": "aborted before an engine had it"}
    return {
        "text": "",
        "output_ids": [],
        "meta_info": {"id": rid, "finish_reason": reason, "output_token_logprobs": []},
    }


def refusal(piece: Mapping[str, Any]) -> tuple[int, Any] | None:
    """Returns the HTTP status and the detail of a refusal that arrives as a piece, because the stream had begun; None
    for any other piece."""
    if "error" in piece:
        error = piece["error"]
        code = error.get("code") if isinstance(error, dict) else None
        return (code if isinstance(code, int) and 400 <= code < 600 else 500), error
    reason = (piece.get("meta_info") or {}).get("finish_reason")
    code = reason.get("status_code") if isinstance(reason, dict) else None
    return None if not isinstance(code, int) or code < 400 else (code, reason)


def _decoded(array: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(array), "<i4")


def _nuclei(parts: Sequence[Sequence[np.ndarray]]) -> JSON:
    starts = np.cumsum([0, *(len(ids) for ids, _ in parts)])
    ends = [bounds[1:] + start for (_, bounds), start in zip(parts, starts, strict=False)]
    arrays = np.concatenate([ids for ids, _ in parts]), np.concatenate([[0], *ends])
    return {
        name: base64.b64encode(array.astype("<i4").tobytes()).decode()
        for name, array in zip(NUCLEI, arrays, strict=True)
    }
