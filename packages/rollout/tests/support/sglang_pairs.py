"""SGLang's recording as an engine of a pair that streams, refuses long prompts, and loses a connection.

    python sglang_pairs.py [flags of sglang_recording.py] [--context-length N]

Where it decodes, a stream begins with one token, and the first request whose prompt begins with 2 gets no answer. Where
it does prefill, a request whose prompt ends with 7 gets no answer once it was handed over. GET /handed-over has the ids
of requests that were handed over.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web
from sglang_recording import Recording, main

DROP = 2
NO_ANSWER = 7


class PairRecording(Recording):
    def __init__(self, flags: dict[str, Any]) -> None:
        super().__init__(flags)
        self.dropped = False
        self.streams: dict[str, tuple[web.Request, web.StreamResponse]] = {}
        self.handed_over: list[str] = []

    def application(self) -> web.Application:
        app = super().application()
        app.router.add_get("/handed-over", self.tell_handed_over)
        return app

    async def tell_handed_over(self, request: web.Request) -> web.Response:
        return web.json_response(self.handed_over)

    async def prefill(self, prompt: list[int], rid: str, room: int, body: dict[str, Any]) -> None:
        await super().prefill(prompt, rid, room, body)
        self.handed_over.append(rid)
        if prompt[-1] == NO_ANSWER:
            await asyncio.Event().wait()

    async def take(self, prompt: list[int], rid: str, room: int, body: dict[str, Any]) -> None:
        await super().take(prompt, rid, room, body)
        self.handed_over.append(rid)

    async def generate(self, request: web.Request) -> web.StreamResponse:  # type: ignore[override]
        body = await request.json()
        first = body["input_ids"][0] if isinstance(body["input_ids"][0], list) else body["input_ids"]
        longest = int(self.flags.get("context_length", 4096))
        if len(first) > longest:
            error = f"The input ({len(first)} tokens) is longer than the model's context length ({longest} tokens)."
            return web.json_response({"error": {"message": error}}, status=400)
        if first[0] == DROP and self.stage == "decode" and not self.dropped:
            self.dropped = True
            self.bodies.append(body)
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if body.get("stream"):
            self.streams[body["rid"][0]] = request, web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        answer = await super().generate(request)
        if not body.get("stream") or answer.status != 200:
            return answer
        _, response = self.streams.pop(body["rid"][0])
        assert isinstance(answer.body, bytes)
        await response.write(event(json.loads(answer.body)[0]) + b"data: [DONE]\n\n")
        return response

    async def one(self, prompt: list[int], params: dict[str, Any], rid: str, body: dict[str, Any]) -> dict[str, Any]:
        if rid in self.streams:
            request, response = self.streams[rid]
            await response.prepare(request)
            pairs = [[-0.5, prompt[-1], None]]
            meta = {"id": rid, "finish_reason": None, "completion_tokens": 1, "output_token_logprobs": pairs}
            await response.write(event({"output_ids": [prompt[-1]], "meta_info": meta}))
        return await super().one(prompt, params, rid, body)


def event(answer: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"index": 0} | answer).encode() + b"\n\n"


if __name__ == "__main__":
    main(PairRecording)
