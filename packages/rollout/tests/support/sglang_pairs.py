"""SGLang's recording as an engine of a pair that streams, refuses long prompts, and loses a connection.

    python sglang_pairs.py [flags of sglang_recording.py] [--context-length N]

Where it decodes, a stream begins with one token, and the first request whose prompt begins with 2 gets no answer.
"""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web
from sglang_recording import Recording, main

DROP = 2


class PairRecording(Recording):
    def __init__(self, flags: dict[str, Any]) -> None:
        super().__init__(flags)
        self.dropped = False
        self.streams: dict[str, tuple[web.Request, web.StreamResponse]] = {}

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
