"""SGLang 0.5.17's server without a model: its paths, verbs, bodies, status codes and answers, taken from its source
(`entrypoints/http_server.py`, `managers/tokenizer_manager.py`, `managers/scheduler.py`), and what it dies of.

    python sglang_recording.py --model-path DIR --host H --port N [any flag of SGLang's server]

A response is the prompt backwards, then token 1. A prompt that begins with 3 is held until it is aborted.

With `--disaggregation-mode` it does its part of a pair (`disaggregation/{prefill,decode}.py`). Prefill listens at
`--disaggregation-bootstrap-port` until a request for the room has come that is asked for, and hands the prompt over;
decode asks there, and answers. A prompt that begins with 4 is not prefilled until it is aborted.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import time
from typing import Any

import aiohttp
from aiohttp import web

EOS = 1
HOLD = 3
HOLD_PREFILL = 4
# Where no request with this room has come for so long, the handshake has failed.
HANDSHAKE_SECONDS = 30.0
PARTS = ("kv_cache", "weights", "cuda_graph")


class Recording:
    def __init__(self, flags: dict[str, Any]) -> None:
        self.flags = flags
        self.version = flags.get("weight_version", "default")
        self.running: dict[str, asyncio.Event] = {}
        self.serving = asyncio.Event()
        self.serving.set()
        self.released: set[str] = set()
        self.snapshot: str | None = None
        self.weights = "first"
        self.calls: list[str] = []
        self.last: dict[str, Any] = {}
        self.stage = flags.get("disaggregation_mode", "")
        # By room: what prefill hands over, and what tells it that it was taken.
        self.rooms: dict[int, tuple[list[int], asyncio.Event]] = {}
        self.came = asyncio.Condition()
        self.bodies: list[dict[str, Any]] = []

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self.note])
        get, post = app.router.add_get, app.router.add_post
        for path, handler in (
            ("/health", self.health),
            ("/health_generate", self.health),
            ("/model_info", self.model_info),
            ("/get_model_info", self.model_info),
            ("/server_info", self.server_info),
            ("/get_weight_version", self.gone),
            ("/v1/loads", self.loads),
            ("/calls", self.told),
        ):
            get(path, handler)
        for path, handler in (
            ("/generate", self.generate),
            ("/abort_request", self.abort),
            ("/pause_generation", self.pause),
            ("/continue_generation", self.go_on),
            ("/update_weights_from_disk", self.update),
            ("/update_weights_from_tensor", self.update),
            ("/update_weights_from_distributed", self.update),
            ("/init_weights_update_group", self.group),
            ("/destroy_weights_update_group", self.group),
            ("/weights_checker", self.check),
            ("/release_memory_occupation", self.release),
            ("/resume_memory_occupation", self.resume),
            ("/flush_cache", self.flush),
        ):
            post(path, handler)
        get("/flush_cache", self.flush)
        return app

    @web.middleware
    async def note(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path not in ("/calls", "/model_info"):
            self.calls.append(request.path)
        if request.method == "POST" and request.path != "/generate":
            self.last[request.path] = await request.json() if request.can_read_body else {}
        return await handler(request)

    async def told(self, request: web.Request) -> web.Response:
        environ = dict(os.environ)
        return web.json_response({"calls": self.calls, "last": self.last, "environ": environ, "bodies": self.bodies})

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.serving.is_set() else 503)

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response({
            "model_path": self.flags["model_path"], "tokenizer_path": self.flags["model_path"], "is_generation": True,
            "preferred_sampling_params": None, "weight_version": self.version, "has_image_understanding": False,
            "has_audio_understanding": False, "model_type": "llama", "architectures": ["LlamaForCausalLM"],
        })  # fmt: skip

    async def server_info(self, request: web.Request) -> web.Response:
        switches = ("enable_memory_saver", "enable_deterministic_inference", "enable_weights_cpu_backup")
        flags = dict.fromkeys(switches, False) | self.flags
        return web.json_response(flags | {"weight_version": self.version, "internal_states": [{}], "version": "0.5.17"})

    async def loads(self, request: web.Request) -> web.Response:
        """With `include=core`, as it is when the server runs without --enable-metrics."""
        load = {
            "timestamp": 1.0, "dp_rank": 0, "num_running_reqs": len(self.running), "num_waiting_reqs": 0,
            "num_waiting_uncached_tokens": 0, "num_used_tokens": 0, "num_total_tokens": 0, "num_active_tokens": 0,
            "max_total_num_tokens": 4096, "max_running_requests": 64, "token_usage": 0.0, "gen_throughput": 0.0,
            "cache_hit_rate": 0.0, "utilization": 0.0, "total_prefill_uncached_tokens": 0, "total_prefill_busy_us": 0,
            "decode_moments": None,
        }  # fmt: skip
        return web.json_response({
            "timestamp": "2026-11-25T00:00:00+00:00", "version": "0.5.17", "accelerator": None, "num_accelerators": 1,
            "loads": [load],
        })  # fmt: skip

    async def gone(self, request: web.Request) -> web.Response:
        message = "Endpoint '/get_weight_version' or '/weight_version' is deprecated. Please use '/model_info' instead."
        return web.json_response({"object": "error", "message": message, "type": "404", "code": 404}, status=404)

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids, params, rids = body["input_ids"], body.get("sampling_params") or {}, body.get("rid")
        single = not isinstance(ids[0], list)
        prompts = [ids] if single else ids
        count = len(prompts)
        params = params if isinstance(params, list) else [params] * count
        if single:
            rids = [rids or "anonymous"]
        for param in params:
            if not 0.0 < param.get("top_p", 1.0) <= 1.0:
                return web.json_response(
                    {"error": {"message": f"top_p must be in (0, 1], got {param['top_p']}."}}, status=400
                )
        rids = rids or [f"rid-{i}" for i in range(count)]
        await self.serving.wait()
        if self.released:
            die("a forward pass over released memory")
        if self.stage:
            self.bodies.append(body)
            if any(body.get(f"bootstrap_{name}") is None for name in ("host", "port", "room")):
                # `_is_fake_transfer` is for probes alone.
                return web.json_response({"error": {"message": "Disaggregated request received without"}}, status=400)
            rooms = [body["bootstrap_room"] + i for i in range(count)]
            try:
                hand_over = self.prefill if self.stage == "prefill" else self.take
                await asyncio.gather(*(hand_over(*each, body) for each in zip(prompts, rids, rooms, strict=True)))
            except Aborted as error:
                return web.json_response({"detail": f"{error} with exception: Aborted by AbortReq."}, status=500)
        outputs = await asyncio.gather(
            *(self.one(*request, body) for request in zip(prompts, params, rids, strict=True))
        )
        return web.json_response(outputs[0] if single else outputs)

    async def until_aborted(self, rid: str, *others: asyncio.Future[Any]) -> None:
        """Waits for one of the others. Raises Aborted if the request is aborted before."""
        event = self.running.setdefault(rid, asyncio.Event())
        aborted = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({aborted, *others}, return_when=asyncio.FIRST_COMPLETED)
            if aborted.done():
                raise Aborted("KVTransferError")
        finally:
            self.running.pop(rid, None)
            for each in (aborted, *others):
                each.cancel()

    async def prefill(self, prompt: list[int], rid: str, room: int, body: dict[str, Any]) -> None:
        if prompt[0] == HOLD_PREFILL:
            await self.until_aborted(rid)
        taken = asyncio.Event()
        async with self.came:
            if room in self.rooms:
                die("two requests have the same room")
            self.rooms[room] = prompt, taken
            self.came.notify_all()
        try:
            await self.until_aborted(rid, asyncio.ensure_future(taken.wait()))
        finally:
            del self.rooms[room]

    async def bootstrap(self, application: web.Application) -> None:
        rooms = web.Application()
        rooms.router.add_get("/room/{room}", self.room)
        runner = web.AppRunner(rooms, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, self.flags["host"], int(self.flags["disaggregation_bootstrap_port"])).start()

    async def room(self, request: web.Request) -> web.Response:
        """The bootstrap server, which hands the prompt of a room over once it has come."""
        number = int(request.match_info["room"])
        async with self.came:
            await asyncio.wait_for(self.came.wait_for(lambda: number in self.rooms), HANDSHAKE_SECONDS)
            prompt, taken = self.rooms[number]
        taken.set()
        return web.json_response(prompt)

    async def take(self, prompt: list[int], rid: str, room: int, body: dict[str, Any]) -> None:
        async def ask() -> None:
            url = f"http://{body['bootstrap_host']}:{body['bootstrap_port']}/room/{room}"
            async with aiohttp.ClientSession() as session, session.get(url) as answer:
                if await answer.json() != prompt:
                    die("the prompt that was handed over is another")

        asking = asyncio.ensure_future(ask())
        await self.until_aborted(rid, asking)
        if not asking.cancelled() and asking.exception() is not None:
            raise Aborted("KVTransferError")

    async def one(self, prompt: list[int], params: dict[str, Any], rid: str, body: dict[str, Any]) -> dict[str, Any]:
        started = time.perf_counter()
        room = params.get("max_new_tokens", 128)
        ids = [*reversed(prompt), EOS]
        finish: dict[str, Any] = {"type": "stop", "matched": EOS}
        if len(ids) > room:
            ids, finish = ids[:room], {"type": "length", "length": room}
        if prompt[0] == HOLD and self.stage != "prefill":
            self.running[rid] = asyncio.Event()
            try:
                await self.running[rid].wait()
            finally:
                del self.running[rid]
            ids, finish = ids[:1], {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        meta: dict[str, Any] = {
            "id": rid, "finish_reason": finish, "prompt_tokens": len(prompt), "weight_version": self.version,
            "num_retractions": 0,
        }  # fmt: skip
        if self.stage == "prefill":
            # It computes the first token, which the other one answers with, and the log-probs of the prompt.
            ids = ids[:1]
        if body.get("return_logprob"):
            scored = body.get("logprob_start_len", -1) >= 0 and self.stage != "decode"
            meta["input_token_logprobs"] = [[-0.25, token, None] for token in prompt] if scored else []
            meta["output_token_logprobs"] = [[-0.5, token, None] for token in ids]
            meta["output_token_logprobs_length"] = len(ids)
        if body.get("return_sampling_mask"):
            if params.get("top_k", -1) == -1:
                error = "return_sampling_mask requires finite top_k"
                finish, ids = {"type": "abort", "message": error, "status_code": None, "err_type": None}, []
                meta |= {"finish_reason": finish, "output_token_logprobs": []}
            meta["output_token_sampling_mask"] = [[token, token + 1] for token in ids]
            meta["output_token_sampling_logprobs"] = [-0.25] * len(ids)
            meta["output_token_sampling_mask_length"] = len(ids)
        meta |= {"reasoning_tokens": 0, "completion_tokens": len(ids), "cached_tokens": 2, "dp_rank": None}
        if "speculative_algorithm" in self.flags:
            meta |= {
                "spec_accept_rate": 0.5, "spec_accept_length": 2.0, "spec_num_correct_drafts": 3,
                "spec_num_proposed_drafts": 6, "spec_verify_ct": 2,
            }  # fmt: skip
        meta |= {"e2e_latency": time.perf_counter() - started, "response_sent_to_client_ts": time.time()}
        text = {} if "skip_tokenizer_init" in self.flags else {"text": "".join(f"<{token}>" for token in ids)}
        return text | {"output_ids": ids, "meta_info": meta}

    async def abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        for rid, event in self.running.items():
            if body.get("abort_all") or rid == body.get("rid"):
                event.set()
        return web.Response()

    async def pause(self, request: web.Request) -> web.Response:
        mode = (await request.json()).get("mode", "abort")
        self.serving.clear()
        while mode == "abort" and self.running:
            for event in self.running.values():
                event.set()
            await asyncio.sleep(0)
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def go_on(self, request: web.Request) -> web.Response:
        self.serving.set()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(self, request: web.Request) -> web.Response:
        if self.running:
            return web.Response(text="Flush cache failed.\n", status=400)
        return web.Response(text="Cache flushed.\nPlease check backend logs for more details.\n")

    async def update(self, request: web.Request) -> web.Response:
        body = await request.json()
        if request.path.endswith("disk") and not os.path.isdir(body["model_path"]):
            message = f"Failed to get weights iterator: {body['model_path']}."
            return web.json_response({"success": False, "message": message, "num_paused_requests": 0}, status=400)
        if body.get("flush_cache", True) and self.running:
            die("AssertionError: Cache flush failed after updating weights")
        if "weights" in self.released:
            die("weights were written to released memory")
        content = body.get("model_path") or body.get("names")
        if "serialized_named_tensors" in body:
            content = [base64.b64decode(part, validate=True).decode() for part in body["serialized_named_tensors"]]
        self.weights = json.dumps(content)
        message = "Succeeded to update model weights."
        if body.get("weight_version") is not None:
            self.version = body["weight_version"]
            message += f" Weight version updated to {self.version}."
        return web.json_response({"success": True, "message": message, "num_paused_requests": 0})

    async def group(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True, "message": "Succeeded to initialize custom process group."})

    async def check(self, request: web.Request) -> web.Response:
        action = (await request.json()).get("action", "checksum")
        answer: dict[str, Any] = {"success": True, "message": "Success."}
        if action == "snapshot":
            self.snapshot = self.weights
        elif action == "reset_tensors":
            self.weights = "noise"
        elif action == "compare" and self.snapshot != self.weights:
            answer = {
                "success": False,
                "message": "check tensor equality failed:\nname=model.norm.weight max_abs_err=1.0",
            }
        elif action == "checksum":
            checksum = f"{hash(self.weights) & 0xFFFF:016x}"
            place = {
                "tp_rank": 0,
                "tp_size": 1,
                "dp_rank": 0,
                "dp_size": 1,
                "pp_rank": 0,
                "pp_size": 1,
                "rank": 0,
                "size": 1,
            }
            rank = {
                "checksums": {"model.norm.weight": checksum},
                "per_gpu_checksum": checksum,
                "parallelism_info": place,
            }
            answer |= {"ranks": [rank], "per_engine_checksum": checksum}
        return web.json_response(answer, status=200 if answer["success"] else 400)

    async def release(self, request: web.Request) -> web.Response:
        tags = (await request.json()).get("tags") or PARTS
        if self.running:
            die("AssertionError: release_memory_occupation should be called only when server is idle.")
        if self.released & set(tags):
            die("memory was released twice")
        self.released |= set(tags)
        return web.json_response(None)

    async def resume(self, request: web.Request) -> web.Response:
        tags = (await request.json()).get("tags") or PARTS
        if not set(tags) <= self.released:
            die(f"KeyError: {sorted(set(tags) - self.released)}")
        self.released -= set(tags)
        return web.json_response(None)


class Aborted(Exception):
    """A request was aborted before it was handed over."""


def die(words: str) -> None:
    print(words, flush=True)
    os._exit(9)


def read_flags(argv: list[str]) -> dict[str, Any]:
    """Any `--name value`, `--name=value` or `--name`."""
    flags: dict[str, Any] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].replace("-", "_", word.count("-")).partition("=")
            flags[name] = value if equals else True
        else:
            flags[name] = word
    return flags


def main(kind: type[Recording] = Recording) -> None:
    flags = read_flags(sys.argv[1:])
    if "refuse" in flags.get("model_path", ""):
        print("ValueError: this model is not supported", flush=True)
        sys.exit(1)
    recording = kind(flags)
    application = recording.application()
    if recording.stage == "prefill":
        application.on_startup.append(recording.bootstrap)
    web.run_app(application, host=flags["host"], port=int(flags["port"]), print=None, access_log=None)


if __name__ == "__main__":
    main()
