"""An asynchronous client of SGLang's HTTP protocol (version 0.5.17), for engines of any kind."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from slime.rollout.engines.http import EngineHTTP
from slime.rollout.engines.streams import StreamedAnswers, with_nuclei
from slime.types.errors import EngineError

JSON = dict[str, Any]


class EngineClient(EngineHTTP):
    """Calls one engine; every call has a deadline. `EngineHTTP` lists the errors."""

    def __init__(
        self,
        url: str,
        name: str = "engine",
        *,
        timeout_seconds: float = 60.0,
        generate_timeout_seconds: float = 3600.0,
        api_key: str | None = None,
    ) -> None:
        super().__init__(url, name, timeout_seconds=timeout_seconds, api_key=api_key)
        self.generate_timeout_seconds = generate_timeout_seconds

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
        on_output: Callable[[JSON], None] | None = None,
        streamed: StreamedAnswers | None = None,
        repeatable: bool = True,
        **extra: Any,
    ) -> Any:
        """Returns the response to one prompt, or a list of responses to a list of prompts.

        on_output: called while the response to a single prompt grows, with all tokens so far. streamed: collects the
        responses while they grow, and has what had arrived if the engine is lost. repeatable: see `call`.

        A response: {"text", "output_ids", "meta_info": {"id", "finish_reason", "prompt_tokens", "completion_tokens",
        "weight_version", "output_token_logprobs": [[log-prob, token id, None], ...], ...}}. Without a tokenizer in the
        engine (--sglang-skip-tokenizer-init) there is no "text".
        """
        body: JSON = {"sampling_params": sampling_params or {}, "return_logprob": return_logprob, **extra}
        body |= {k: v for k, v in (("input_ids", input_ids), ("text", text), ("rid", rid)) if v is not None}
        timeout = timeout_seconds or self.generate_timeout_seconds
        if on_output is not None:
            streamed = StreamedAnswers(1, on_output)
        if streamed is not None:
            body["stream"] = True
            add = partial(streamed.add, engine=self.name)
            await self.follow("/generate", body, add, headers=headers, timeout_seconds=timeout, repeatable=repeatable)
            self._check_complete(streamed)
            outputs = streamed.outputs()
            return outputs if _is_list(text if input_ids is None else input_ids) else outputs[0]
        answer = await self.post("/generate", body, headers=headers, timeout_seconds=timeout, repeatable=repeatable)
        if isinstance(answer, list):
            return [with_nuclei(each, self.name) for each in answer]
        return with_nuclei(answer, self.name)

    def _check_complete(self, streamed: StreamedAnswers) -> None:
        if not streamed.complete:
            raise EngineError(
                f"engine {self.name} at {self.url} is gone (POST /generate: the stream ended before its answers)",
                field=self.name,
            )

    async def chat(self, body: Mapping[str, Any], timeout_seconds: float | None = None) -> JSON:
        """Posts to /v1/chat/completions."""
        return await self.post(
            "/v1/chat/completions", body, timeout_seconds=timeout_seconds or self.generate_timeout_seconds
        )

    async def abort(self, rid: str | None = None) -> None:
        """Ends request `rid`, or all if None. Each is answered with its tokens so far and the finish reason "abort"."""
        body = {"rid": rid} if rid is not None else {"abort_all": True}
        await self.post("/abort_request", body, repeatable=True)

    async def pause(self, mode: str = "abort") -> None:
        """Pauses generation; new requests wait.

        mode: "abort" ends running requests, "retract" starts them over later, "in_place" freezes them.
        """
        await self.post("/pause_generation", {"mode": mode}, repeatable=True)

    async def continue_(self) -> None:
        await self.post("/continue_generation", {}, repeatable=True)

    async def flush_cache(self, wait_seconds: float = 0.0) -> None:
        """Drops the prefix cache. Raises InvalidField if requests still run after `wait_seconds`."""
        path = f"/flush_cache?timeout={wait_seconds:g}" if wait_seconds else "/flush_cache"
        await self.post(path, {}, timeout_seconds=self.timeout_seconds + wait_seconds, repeatable=True)

    async def weight_version(self) -> str:
        return str((await self.model_info())["weight_version"])

    async def health_generate(self, timeout_seconds: float | None = None) -> None:
        """Returns when the engine has generated a token. SGLang takes a second for that, and cannot while paused."""
        await self.get("/health_generate", timeout_seconds=timeout_seconds)

    async def model_info(self, timeout_seconds: float | None = None) -> JSON:
        return await self.get("/model_info", timeout_seconds=timeout_seconds)

    async def server_info(self) -> JSON:
        """Returns the flags that the server runs with, and its state."""
        return await self.get("/server_info")

    async def loads(self, timeout_seconds: float | None = None) -> JSON:
        """Returns the running and waiting requests and the use of the key-value cache, per data-parallel rank."""
        return await self.get("/v1/loads?include=core", timeout_seconds=timeout_seconds)

    async def update_weights_from_disk(
        self, model_path: str, weight_version: int | str, timeout_seconds: float = 600.0
    ) -> JSON:
        body = {"model_path": str(model_path), "weight_version": str(weight_version)}
        return await self.post("/update_weights_from_disk", body, timeout_seconds=timeout_seconds)

    async def update_weights_from_bucket(
        self, bucket: bytes, weight_version: int | str, *, last: bool, timeout_seconds: float = 600.0
    ) -> JSON:
        """Sends one bucket of weights to an embedded engine.

        bucket: safetensors, with Hugging Face names. last: whether it completes the update, so that it takes effect.
        """
        return await self.call(
            "POST",
            "/update_weights_from_tensor",
            data=bucket,
            params={"weight_version": str(weight_version), "last": "true" if last else "false"},
            headers={"Content-Type": "application/octet-stream"},
            timeout_seconds=timeout_seconds,
        )

    async def update_weights_from_tensor(
        self,
        serialized: Sequence[bytes],
        *,
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: int | str | None = None,
        timeout_seconds: float = 600.0,
    ) -> JSON:
        """Sends tensors to SGLang, which reports `weight_version` from the call on that carries one.

        serialized: named tensors, as one pickle of SGLang's `MultiprocessingSerializer` per tensor-parallel rank.
        """
        encoded = [base64.b64encode(part).decode() for part in serialized]
        body = {"serialized_named_tensors": encoded, "load_format": load_format, "flush_cache": flush_cache}
        return await self._update("/update_weights_from_tensor", body, weight_version, timeout_seconds)

    async def init_weights_update_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str = "nccl",
        timeout_seconds: float = 300.0,
    ) -> JSON:
        """Makes SGLang's ranks join a process group as ranks from `rank_offset` on; returns when all have joined."""
        body = {
            "master_address": master_address, "master_port": master_port, "rank_offset": rank_offset,
            "world_size": world_size, "group_name": group_name, "backend": backend,
        }  # fmt: skip
        return await self.post("/init_weights_update_group", body, timeout_seconds=timeout_seconds)

    async def destroy_weights_update_group(
        self, group_name: str = "weight_update_group", timeout_seconds: float = 60.0
    ) -> JSON:
        return await self.post(
            "/destroy_weights_update_group", {"group_name": group_name}, timeout_seconds=timeout_seconds
        )

    async def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str = "weight_update_group",
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: int | str | None = None,
        timeout_seconds: float = 600.0,
    ) -> JSON:
        """Makes SGLang receive these tensors by broadcast from rank 0 of the group. dtypes: names like "bfloat16"."""
        body = {
            "names": list(names), "dtypes": list(dtypes), "shapes": [list(shape) for shape in shapes],
            "group_name": group_name, "load_format": load_format, "flush_cache": flush_cache,
        }  # fmt: skip
        return await self._update("/update_weights_from_distributed", body, weight_version, timeout_seconds)

    async def check_weights(self, action: str = "checksum", timeout_seconds: float = 600.0) -> JSON:
        """Checks weights. action: "snapshot" keeps a copy, "reset_tensors" fills the weights with noise, "compare"
        raises InvalidField naming the tensors that differ from the copy, "checksum" returns the checksums of all
        "ranks" and the "per_engine_checksum" over them.
        """
        return await self.post("/weights_checker", {"action": action}, timeout_seconds=timeout_seconds)

    async def release_memory(self, parts: Sequence[str], timeout_seconds: float = 120.0) -> None:
        """Releases `parts`, some of "weights", "kv_cache" and "cuda_graph". None may be released already, and the
        engine must be idle."""
        await self.post("/release_memory_occupation", {"tags": list(parts)}, timeout_seconds=timeout_seconds)

    async def resume_memory(self, parts: Sequence[str], timeout_seconds: float = 120.0) -> None:
        """Allocates `parts` again; all of them must be released."""
        await self.post("/resume_memory_occupation", {"tags": list(parts)}, timeout_seconds=timeout_seconds)

    async def _update(self, path: str, body: JSON, weight_version: int | str | None, timeout_seconds: float) -> JSON:
        if weight_version is not None:
            body["weight_version"] = str(weight_version)
        return await self.post(path, body, timeout_seconds=timeout_seconds)

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


def _is_list(prompts: Any) -> bool:
    """Returns whether a request is of a list of prompts, token ids or texts."""
    return isinstance(prompts, Sequence) and not isinstance(prompts, str) and not isinstance(prompts[0], int)
