"""A run without a model: the real loops, buffer and rollout service, an engine of set latency, a trainer that sleeps.

The engine makes a token of each request every `token_seconds`, for as many tokens as `lengths` says of its prompt, and
takes any number of requests at once. Aborted requests answer with what they have, as SGLang's do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slime.buffer.service import serve as serve_buffer
from slime.buffer.settings import BufferSettings
from slime.launcher.config.run_config import RunConfig, parse
from slime.launcher.services.generation import ContinuousGeneration, pace_of
from slime.rollout.service import serve as serve_rollout
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.clients import BufferClient, RolloutClient
from slime.types.pace import TrainerPace
from slime.types.rpc import RpcSettings

Metrics = dict[str, float]
DEADLINE = 600.0
TOKEN = 3


class LatentEngine:
    """Serves SGLang's protocol in a thread. lengths: tokens of the response by the number that the prompt is.

    ends_at: by that number, the weight version under which a response can end; before, it makes one token.
    """

    def __init__(self, lengths: Sequence[int], token_seconds: float) -> None:
        self.lengths = lengths
        self.ends_at: dict[int, int] = {}
        self.token_seconds = token_seconds
        self.version = 0
        self.made = 0
        self._aborts: set[asyncio.Event] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="latent-engine", daemon=True)
        self._thread.start()
        assert self._ready.wait(DEADLINE)

    @property
    def running(self) -> int:
        return len(self._aborts)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(DEADLINE)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        for path in ("/pause_generation", "/continue_generation", "/flush_cache"):
            app.router.add_post(path, self._ok)
        for path in ("/model_info", "/server_info", "/health_generate"):
            app.router.add_get(path, self._ok)
        self._add_routes(app)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        sockets: Any = site._server
        self.address = f"127.0.0.1:{sockets.sockets[0].getsockname()[1]}"

    def _add_routes(self, app: web.Application) -> None:
        """Adds the routes of a subclass."""

    async def _ok(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": str(self.version)})

    async def _abort(self, request: web.Request) -> web.Response:
        for event in self._aborts:
            event.set()
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response(await asyncio.gather(*map(self._respond, body["input_ids"])))

    async def _respond(self, prompt: list[int]) -> dict[str, Any]:
        number, done = prompt[0] - TOKEN - 1, len(prompt) - 1
        left, version = self.lengths[number] - done, self.version
        abort, started = asyncio.Event(), time.monotonic()
        self._aborts.add(abort)
        try:
            if version < self.ends_at.get(number, 0):
                await abort.wait()
                made = 0 if done else 1
            else:
                await asyncio.wait_for(abort.wait(), left * self.token_seconds)
                made = min(left - 1, int((time.monotonic() - started) / self.token_seconds))
        except TimeoutError:
            made = left
        finally:
            self._aborts.discard(abort)
        self.made += made
        meta = {
            "finish_reason": {"type": "stop" if made == left else "abort"},
            "prompt_tokens": len(prompt), "completion_tokens": made, "weight_version": str(version),
            "output_token_logprobs": [[-1.0, TOKEN, None]] * made,
        }  # fmt: skip
        return {"text": "", "output_ids": [TOKEN] * made, "meta_info": meta}


def write_inputs(directory: Path, prompts: int) -> Path:
    """Writes a tokenizer in which each prompt is one token, and the prompts."""
    names = ["<pad>", "<eos>", "<unk>", "t", *(f"p{number}" for number in range(prompts))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 1 << 20}))
    rows = [{"prompt": f"p{number}", "label": "1"} for number in range(prompts)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


class NoReport:
    """A report that keeps the rows of the steps. finished: when each was reported."""

    def __init__(self) -> None:
        self.rows: list[Metrics] = []
        self.finished: list[float] = []

    def evaluation(self, step: int, metrics: Metrics, examples: list[Any]) -> None: ...

    def hold(self, step: int, metrics: Metrics) -> None: ...

    def step(self, step: int, metrics: Metrics, examples: list[Any]) -> None:
        self.rows.append(metrics)
        self.finished.append(time.perf_counter())


@dataclass
class LatentRun:
    """Stands in for `Services` in the loops. train: called with each step in place of training."""

    config: RunConfig
    engine: LatentEngine
    buffer: BufferClient
    rollout: RolloutClient
    train: Callable[[int], None]
    first_step: int = 0
    examples: list[Any] = field(default_factory=list)
    events: list[tuple[str, int]] = field(default_factory=list)
    sealed: dict[int, list[Any]] = field(default_factory=dict)
    _metrics: dict[int, Metrics] = field(default_factory=dict)
    _pace: TrainerPace | None = None
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4))

    @property
    def num_rollout(self) -> int:
        return self.config.launcher.num_rollout or 0

    def generating(self) -> ContinuousGeneration:
        self._pace = pace_of(self.config)
        return ContinuousGeneration(self, self.rollout.generate_on, self._pace, self.first_step)

    def generate(self, rollout_id: int) -> Metrics:
        return self.rollout.generate(rollout_id, self.config.rollout.rollout_batch_size, timeout=DEADLINE).metrics

    def seal(self, step: int, generated: Metrics) -> None:
        size = self.config.rollout.rollout_batch_size
        sealed = self.buffer.seal_step(step, size, wait_seconds=DEADLINE, metrics=generated, pace=self._pace)
        self.sealed[step] = list(sealed)
        self.events.append(("seal", step))
        staleness = [step - summary.oldest_weight_version for summary in sealed]
        self._metrics[step] = {
            "rollout/staleness": sum(staleness) / len(staleness),
            "rollout/staleness/max": float(max(staleness)),
            "rollout/tokens": float(sum(summary.response_length for summary in sealed)),
            "rollout/dropped_stale": float(sealed.rejected.get("stale", 0)),
            **sealed.metrics,
        }

    def train_step(self, step: int) -> Metrics:
        self.train(step)
        self.buffer.acknowledge_step(step)
        self.events.append(("train", step))
        return self._metrics.pop(step)

    def update_weights(self, version: int) -> Metrics:
        self.rollout.begin_weight_update(version, timeout=DEADLINE)
        self.engine.version = version
        self.rollout.commit_weight_update(version, timeout=DEADLINE)
        self.events.append(("push", version))
        return {}

    def offload(self) -> Metrics:
        return {}

    onload = offload

    def begin(self, function: Callable[[], Any]) -> Future[Any]:
        return self._pool.submit(function)

    def join(self, future: Future[Any]) -> Any:
        return future.result(DEADLINE)


@contextlib.contextmanager
def latent_run(
    directory: Path, lengths: Sequence[int], token_seconds: float, train: Callable[[int], None], *flags: str
) -> Iterator[LatentRun]:
    """A run on `len(lengths)` prompts; flags: those of `slime train-async`, with --num-rollout and sizes."""
    directory.mkdir(parents=True, exist_ok=True)
    write_inputs(directory, len(lengths))
    words = [
        "--hf-checkpoint", str(directory), "--prompt-data", str(directory / "prompts.jsonl"), "--input-key", "prompt",
        "--label-key", "label", "--rm-type", "random", "--rollout-max-response-len", "1000000",
    ]  # fmt: skip
    engine = LatentEngine(lengths, token_seconds)
    with contextlib.ExitStack() as stack:
        stack.callback(engine.stop)
        words += ["--rollout-external-engine-addrs", engine.address, *flags]
        config = parse(words, check=False, environment={})
        settings = BufferSettings(prompt_data=str(directory / "prompts.jsonl"), input_key="prompt", label_key="label")
        buffer_service = serve_buffer(settings, RpcSettings())
        stack.callback(buffer_service.stop, 0)
        buffer = stack.enter_context(BufferClient(buffer_service.address))
        rollout_settings: RolloutSettings = config.rollout
        rollout_service = serve_rollout(rollout_settings, RpcSettings(), buffer_address=buffer_service.address)
        stack.callback(rollout_service.stop, 0)
        rollout = stack.enter_context(RolloutClient(rollout_service.address, writer=buffer.open_run("latent")))
        run = LatentRun(config, engine, buffer, rollout, train)
        stack.callback(run._pool.shutdown, wait=False)
        yield run
