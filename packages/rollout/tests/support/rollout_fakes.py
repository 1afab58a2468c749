"""An engine that speaks the protocol without a model, a tokenizer of characters, and a buffer in memory."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from slime.types import Sample, SampleGroup
from slime.types.clients import Writer
from slime.types.errors import LeaseLost
from slime.types.sample.validate import validate_finished, validate_samples

EOS = 1
VOCABULARY = ["<pad>", "<eos>", *"0123456789>"]


class CharTokenizer:
    eos_token = "<eos>"
    eos_token_id = EOS

    def __init__(self) -> None:
        self.calls = 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        self.calls += 1
        return [VOCABULARY.index(c) for c in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return decode([i for i in ids if i != EOS or not skip_special_tokens])

    def apply_chat_template(self, messages: list[dict[str, str]], **kwargs: Any) -> str:
        return "".join(m["content"] for m in messages) + ">"


def decode(ids: list[int]) -> str:
    return "".join(VOCABULARY[i] for i in ids)


def reverse(ids: list[int], params: dict[str, Any]) -> list[int]:
    """Returns the answer of a perfect model of the tiny task."""
    digits = [i for i in ids if i > EOS and i != VOCABULARY.index(">")]
    return [*digits[::-1], EOS]


class FakeEngine:
    """answer: prompt ids and sampling parameters to response ids. `hold` keeps /generate waiting until an abort.

    die_after: the server drops connections from that many requests of /generate on. status: what it answers.
    loads: its answer to /v1/loads, to which an exception makes it never answer; None: it has no such path. meta_info:
    added to that of answers.
    """

    kind = "embedded"
    api_key = None

    def __init__(
        self, answer: Callable[[list[int], dict[str, Any]], list[int]] = reverse, name: str = "fake-0"
    ) -> None:
        self.name = name
        self.answer = answer
        self.version = "0"
        self.status = 200
        self.tokens_an_image = 4
        self.die_after: int | None = None
        self.held_prompts: set[tuple[int, ...]] = set()
        self.paused = False
        # Released once for each token of a stream; None streams without waiting.
        self.pace: threading.Semaphore | None = None
        self.loads: dict[str, Any] | Exception | None = None
        # The requests that had arrived at each poll of the load.
        self.polled: list[int] = []
        self.meta_info: dict[str, Any] = {}
        self.requests: list[dict[str, Any]] = []
        self.aborted: list[Any] = []
        self.busy = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._abort: asyncio.Event | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(120)

    def raise_if_dead(self) -> None:
        return None

    def stop(self, grace_seconds: float = 5.0) -> None:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._cleanup(), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(120)
            self._loop.close()

    async def _cleanup(self) -> None:
        assert self._abort is not None
        self._abort.set()
        await self._runner.cleanup()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()

    async def _start(self) -> None:
        self._abort = asyncio.Event()
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort_request)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._continue)
        app.router.add_post("/flush_cache", self._ok)
        app.router.add_post("/release_memory_occupation", self._ok)
        app.router.add_post("/resume_memory_occupation", self._ok)
        app.router.add_post("/refuses", self._refuse)
        app.router.add_get("/health_generate", self._ok)
        app.router.add_get("/model_info", self._version)
        app.router.add_get("/v1/loads", self._loads)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self.url = f"http://127.0.0.1:{self.port}"

    async def _ok(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _loads(self, request: web.Request) -> web.Response:
        self.polled.append(len(self.requests))
        if self.loads is None:
            raise web.HTTPNotFound
        if isinstance(self.loads, Exception):
            await asyncio.Event().wait()
        return web.json_response(self.loads)

    async def _pause(self, request: web.Request) -> web.Response:
        self.paused = True
        return web.json_response({})

    async def _continue(self, request: web.Request) -> web.Response:
        self.paused = False
        return web.json_response({})

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.aborted.append(body.get("rid") or "all")
        assert self._abort is not None
        self._abort.set()
        return web.json_response({})

    async def _refuse(self, request: web.Request) -> web.Response:
        return web.json_response({"success": False, "message": "no such tensor"})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.busy.set()
        if self.die_after is not None and len(self.requests) > self.die_after:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if self.status != 200:
            return web.json_response({"error": {"message": "it broke"}}, status=self.status)
        prompts, params = body["input_ids"], body["sampling_params"]
        single = not isinstance(prompts[0], list)
        if single:
            prompts = [prompts]
        if isinstance(params, dict):
            params = [params] * len(prompts)
        held = any(tuple(p) in self.held_prompts for p in prompts)
        if held:
            assert self._abort is not None
            await self._abort.wait()
        outputs = [self._output(p, s, aborted=held) for p, s in zip(prompts, params, strict=True)]
        for output, images in zip(outputs, body.get("image_data") or [], strict=False):
            output["meta_info"]["prompt_tokens"] += (self.tokens_an_image - 1) * len(images)
        if body.get("stream"):
            return await self._stream(request, outputs[0])
        return web.json_response(outputs[0] if single else outputs)

    async def _stream(self, request: web.Request, output: dict[str, Any]) -> web.StreamResponse:
        """The output as it grows, a token an event."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        pairs = output["meta_info"]["output_token_logprobs"]
        for count in range(1, len(pairs)):
            meta = output["meta_info"] | {"finish_reason": None, "output_token_logprobs": pairs[:count]}
            meta |= {"completion_tokens": count}
            part = {"output_ids": output["output_ids"][:count], "meta_info": meta}
            await response.write(f"data: {json.dumps(part)}\n\n".encode())
            if self.pace is not None:
                await asyncio.to_thread(self.pace.acquire, timeout=60)
        await response.write(f"data: {json.dumps(output)}\n\ndata: [DONE]\n\n".encode())
        return response

    def _output(self, prompt: list[int], params: dict[str, Any], aborted: bool) -> dict[str, Any]:
        ids = self.answer(prompt, params)
        reason = "stop"
        if aborted:
            ids, reason = ids[:1], "abort"
        elif len(ids) > params["max_new_tokens"]:
            ids, reason = ids[: params["max_new_tokens"]], "length"
        meta = {
            "finish_reason": {"type": reason},
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "weight_version": self.version,
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        return {"text": decode(ids), "output_ids": ids, "meta_info": meta | self.meta_info}


@dataclass
class Leased:
    token: str
    group: SampleGroup


@dataclass
class FakeBuffer:
    """The calls of BufferClient that a rollout makes."""

    groups: list[SampleGroup]
    evaluation: dict[str, list[SampleGroup]] = field(default_factory=dict)
    samples_each: int = 1

    def __post_init__(self) -> None:
        self.waiting = list(self.groups)
        self.leased: dict[str, SampleGroup] = {}
        self.completed: dict[int, list[Sample]] = {}
        self.returned: list[tuple[int, list[Sample]]] = []
        self.rejected: list[tuple[int, str]] = []
        self.renewed: list[str] = []
        self.calls_with_several = 0
        self.run = Writer("run", 1)
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def lease_groups(self, max_groups: int, ttl_seconds: float, wait_seconds: float, worker_id: str) -> list[Leased]:
        with self._lock:
            taken, self.waiting = self.waiting[:max_groups], self.waiting[max_groups:]
            leases = [Leased(f"token-{next(self._numbers)}", copy.deepcopy(group)) for group in taken]
            self.leased.update({lease.token: lease.group for lease in leases})
            return leases

    def __enter__(self) -> FakeBuffer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def get_run(self) -> Writer:
        return self.run

    def _end(self, token: str) -> SampleGroup:
        with self._lock:
            if token not in self.leased:
                raise LeaseLost(f"no lease {token}", field="lease_token", value=token)
            return self.leased.pop(token)

    def renew_leases(self, tokens: list[str], ttl_seconds: float) -> list[str]:
        self.renewed.extend(tokens)
        return []

    def return_group(self, token: str, samples: list[Sample] = ()) -> None:  # type: ignore[assignment]
        group = self._end(token)
        self.returned.append((group.group_index, list(samples)))
        if samples:
            self.waiting.append(SampleGroup(group.group_index, group.dataset, copy.deepcopy(list(samples))))
        else:
            self.waiting.append(next(g for g in self.groups if g.group_index == group.group_index))

    def complete_group(self, token: str, samples: list[Sample]) -> bool:
        validate_samples(samples, validate_finished)
        self.completed[self._end(token).group_index] = list(samples)
        return False

    def complete_groups(self, groups: list[tuple[str, list[Sample]]]) -> list[bool]:
        self.calls_with_several += 1
        for token, samples in groups:
            validate_samples(samples, validate_finished)
            if token not in self.leased:
                raise LeaseLost(f"no lease {token}", field="lease_token", value=token)
        return [self.complete_group(token, samples) for token, samples in groups]

    def reject_group(self, token: str, reason: str) -> None:
        self.rejected.append((self._end(token).group_index, reason))

    def stats(self) -> Any:
        return SimpleNamespace(evaluation_sets=tuple(self.evaluation), groups={"ready": len(self.waiting)})

    def add_prompts(self, prompts: list[dict[str, Any]]) -> Any:
        """Groups of `samples_each` samples."""
        with self._lock:
            first, n = len(self.groups), self.samples_each
            for number, prompt in enumerate(prompts, start=first):
                samples = [Sample(group_index=number, index=number * n + i, **copy.deepcopy(prompt)) for i in range(n)]
                self.groups.append(SampleGroup(number, "train", samples))
            self.waiting += self.groups[first:]
            return SimpleNamespace(first_group_index=first)

    def read_evaluation_set(self, name: str) -> list[SampleGroup]:
        return copy.deepcopy(self.evaluation[name])


def prompt_groups(count: int, n: int, digits: int = 3, first: int = 0) -> list[SampleGroup]:
    """Groups of the tiny task: digits to be reversed."""
    groups = []
    for g in range(first, first + count):
        text = f"{g * 7 % 10**digits:0{digits}d}"
        samples = [Sample(group_index=g, index=g * n + i, prompt=text + ">", label=text[::-1]) for i in range(n)]
        groups.append(SampleGroup(g, "train", samples))
    return groups
