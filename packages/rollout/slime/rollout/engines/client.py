"""An asynchronous client of SGLang's HTTP protocol, for engines of either kind."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from slime.types.errors import DeadlineExceeded, EngineError, InvalidField, SlimeError

JSON = dict[str, Any]


class EngineClient:
    """Calls one engine; every call has a deadline.

    Raises InvalidField where the engine refuses a request (4xx), EngineError where it cannot be reached, goes away or
    fails (5xx), DeadlineExceeded where it does not answer in time.
    Belongs to the event loop that it is first used in; close it there (`async with` does).
    """

    def __init__(
        self,
        url: str,
        name: str = "engine",
        *,
        timeout_seconds: float = 60.0,
        generate_timeout_seconds: float = 3600.0,
    ) -> None:
        self.url = url.rstrip("/")
        self.name = name
        self.timeout_seconds = timeout_seconds
        self.generate_timeout_seconds = generate_timeout_seconds
        self._session: aiohttp.ClientSession | None = None

    async def generate(
        self,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        text: str | Sequence[str] | None = None,
        rid: str | Sequence[str] | None = None,
        return_logprob: bool = True,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
        **extra: Any,
    ) -> Any:
        """One response for one prompt, a list of them for a list of prompts.

        A response: {"text", "output_ids", "meta_info": {"id", "finish_reason", "prompt_tokens", "completion_tokens",
        "weight_version", "output_token_logprobs": [[log-prob, token id, None], ...], ...}}.
        """
        body: JSON = {"sampling_params": sampling_params or {}, "return_logprob": return_logprob, **extra}
        body |= {k: v for k, v in (("input_ids", input_ids), ("text", text), ("rid", rid)) if v is not None}
        timeout = timeout_seconds or self.generate_timeout_seconds
        return await self.post("/generate", body, headers=headers, timeout_seconds=timeout)

    async def chat(self, body: Mapping[str, Any], timeout_seconds: float | None = None) -> JSON:
        """POST /v1/chat/completions."""
        return await self.post(
            "/v1/chat/completions", body, timeout_seconds=timeout_seconds or self.generate_timeout_seconds
        )

    async def abort(self, rid: str | None = None) -> None:
        """Ends request `rid`, or all of them without one; each answers with what it has and finish reason "abort"."""
        await self.post("/abort_request", {"rid": rid} if rid is not None else {"abort_all": True})

    async def pause(self, mode: str = "abort") -> None:
        """abort: ends what runs; retract: starts it over later; in_place: freezes it. New requests wait."""
        await self.post("/pause_generation", {"mode": mode})

    async def continue_(self) -> None:
        await self.post("/continue_generation", {})

    async def flush_cache(self) -> None:
        await self.get("/flush_cache")

    async def weight_version(self) -> str:
        return str((await self.get("/get_weight_version"))["weight_version"])

    async def health_generate(self, timeout_seconds: float | None = None) -> None:
        await self.get("/health_generate", timeout_seconds=timeout_seconds)

    async def model_info(self) -> JSON:
        return await self.get("/get_model_info")

    async def server_info(self) -> JSON:
        return await self.get("/server_info")

    async def update_weights_from_disk(
        self, model_path: str, weight_version: int | str, timeout_seconds: float = 600.0
    ) -> JSON:
        body = {"model_path": str(model_path), "weight_version": str(weight_version)}
        return await self.post("/update_weights_from_disk", body, timeout_seconds=timeout_seconds)

    async def update_weights_from_bucket(
        self, bucket: bytes, weight_version: int | str, *, last: bool, timeout_seconds: float = 600.0
    ) -> JSON:
        """Embedded engines only. bucket: safetensors of tensors by their HF names; `last` makes all take effect."""
        return await self._call(
            "POST",
            "/update_weights_from_tensor",
            data=bucket,
            params={"weight_version": str(weight_version), "last": "true" if last else "false"},
            headers={"Content-Type": "application/octet-stream"},
            timeout_seconds=timeout_seconds,
        )

    async def get(self, path: str, *, timeout_seconds: float | None = None) -> Any:
        return await self._call("GET", path, timeout_seconds=timeout_seconds)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
    ) -> Any:
        return await self._call("POST", path, json=body, headers=headers, timeout_seconds=timeout_seconds)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _call(self, method: str, path: str, *, timeout_seconds: float | None = None, **request: Any) -> Any:
        seconds = timeout_seconds or self.timeout_seconds
        if self._session is None:
            # Rollouts keep hundreds of requests open at once; the engine queues them.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        try:
            async with self._session.request(
                method, self.url + path, timeout=aiohttp.ClientTimeout(total=seconds), **request
            ) as response:
                body = await response.read()
        except TimeoutError:
            raise DeadlineExceeded(
                f"engine {self.name}: no answer to {method} {path} in {seconds:g} s", field=path, value=seconds
            ) from None
        except aiohttp.ClientError as error:
            reason = str(error) or type(error).__name__
            raise EngineError(
                f"engine {self.name} at {self.url} is gone ({method} {path}: {reason})", field=self.name, value=reason
            ) from error
        if response.status >= 400:
            raise self._refusal(method, path, response.status, body)
        try:
            return json.loads(body)
        except json.JSONDecodeError:
            # SGLang answers /flush_cache and /health with text.
            return {"message": body.decode(errors="replace")}

    def _refusal(self, method: str, path: str, status: int, body: bytes) -> SlimeError:
        text = body.decode(errors="replace")
        try:
            detail = json.loads(text)
        except json.JSONDecodeError:
            detail = {}
        error = detail.get("error", detail) if isinstance(detail, dict) else {}
        error = error if isinstance(error, dict) else {"message": str(error)}
        message = f"engine {self.name} answered {method} {path} with {status}: {error.get('message') or text[:500]}"
        if 400 <= status < 500:
            field, value, expected = (str(error.get(key) or "") for key in ("field", "value", "expected"))
            return InvalidField(field, value, expected, message)
        return EngineError(message, field=self.name, value=status)
