"""An engine that answers at once, with SGLang's answers of N tokens and their log-probs, encoded beforehand.

    python benchmarks/gpu/canned_engine.py PORT_FILE [--tokens 256] [--delay-ms 0] [--engines 1]

What is measured against it is the client's side alone. It writes the port that it listens on into PORT_FILE; with
`--engines N` it listens on N ports, as so many engines, and writes one a line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path
from typing import Any

from aiohttp import web


def answer(tokens: int) -> tuple[bytes, bytes]:
    """One response of SGLang, around the place of the request's id."""
    rng = random.Random(0)
    ids = [rng.randrange(100, 49_000) for _ in range(tokens)]
    meta = {
        "id": "ID", "finish_reason": {"type": "length", "length": tokens}, "prompt_tokens": 64, "weight_version": "0",
        "num_retractions": 0, "input_token_logprobs": [],
        "output_token_logprobs": [[-rng.expovariate(1.0), token, None] for token in ids],
        "output_token_logprobs_length": tokens, "reasoning_tokens": 0, "completion_tokens": tokens, "cached_tokens": 0,
        "dp_rank": None, "e2e_latency": 1.5, "response_sent_to_client_ts": 1.0,
    }  # fmt: skip
    text = " ".join(f"word{token % 1000}" for token in ids)
    encoded = json.dumps({"text": text, "output_ids": ids, "meta_info": meta}, separators=(",", ":")).encode()
    before, after = encoded.split(b'"ID"')
    return before + b'"', b'"' + after


def application(tokens: int, delay_seconds: float) -> web.Application:
    before, after = answer(tokens)

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        single = not isinstance(body["input_ids"][0], list)
        rids = ["anonymous"] if single else body.get("rid") or ["anonymous"] * len(body["input_ids"])
        await asyncio.sleep(delay_seconds)
        answers = b",".join(before + rid.encode() + after for rid in rids)
        return web.Response(body=answers if single else b"[" + answers + b"]", content_type="application/json")

    async def ok(request: web.Request) -> web.Response:
        return web.json_response({"weight_version": "0", "version": "canned"})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/generate", generate)
    for path in ("/model_info", "/server_info", "/health_generate"):
        app.router.add_get(path, ok)
    for path in ("/abort_request", "/flush_cache"):
        app.router.add_post(path, ok)
    return app


async def serve(port_file: Path, tokens: int, delay_seconds: float, engines: int = 1) -> None:
    runner = web.AppRunner(application(tokens, delay_seconds), access_log=None)
    await runner.setup()
    ports = []
    for _ in range(engines):
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        sockets: Any = site._server
        ports.append(str(sockets.sockets[0].getsockname()[1]))
    partial = port_file.with_suffix(".partial")
    partial.write_text("\n".join(ports))
    partial.rename(port_file)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("port_file", type=Path)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--engines", type=int, default=1, help="Ports to listen on (default: 1)")
    options = parser.parse_args()
    asyncio.run(serve(options.port_file, options.tokens, options.delay_ms / 1000, options.engines))


if __name__ == "__main__":
    main()
