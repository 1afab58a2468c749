"""Sessions, training runs and samplers: the work of the SDK's requests, apart from HTTP."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.launcher.tinker.adapters import AdapterRequest, SharedBase
from slime.launcher.tinker.futures import Futures
from slime.launcher.tinker.models import Models, TrainingRun
from slime.launcher.tinker.paths import SAMPLER, TRAINING, CheckpointStore
from slime.launcher.tinker.requests import (
    decode_pass,
    integer,
    read_adam,
    read_pass,
    read_sampling,
    text,
)
from slime.launcher.tinker.sampling import Sampler, SamplerWeights
from slime.launcher.tinker.training import TrainedModel
from slime.trainer.trainer import pick_device, warn_of_emulated_bfloat16
from slime.types.directories import remove_directory
from slime.types.errors import InvalidField, NotAvailable, NotFound, WrongState

log = logging.getLogger(__name__)

# The SDK sends a heartbeat every 10 s.
SILENT_SECONDS = 120.0
MOST_SESSIONS = 1024
FULL_WEIGHTS = (
    "this service trains all weights of the model (--full-weights): there is no LoRA, so rank and seed of "
    "create_lora_training_client have no effect, and learning rates for full fine-tuning fit"
)
Body = Mapping[str, Any]


@dataclass(frozen=True)
class Served:
    """The base model, in `directory`, and its settings.

    names: the names under which requests may ask for it; context_length: in tokens; scratch: directory of snapshots,
    removed with the service; keep: number of the newest snapshots of a training run that can be sampled from.
    full_weights: whether models train all of their weights, not LoRA adapters.
    """

    directory: Path
    names: tuple[str, ...]
    context_length: int
    store: CheckpointStore
    scratch: Path
    bf16: bool = False
    keep: int = 4
    full_weights: bool = False


@dataclass
class _Session:
    heard: float = field(default_factory=time.monotonic)
    ended: bool = False


@dataclass(frozen=True)
class _SamplingSession:
    weights: SamplerWeights
    model_path: str | None = None


class Service:
    """Does the work of the SDK's requests, apart from HTTP. Used on one event loop."""

    def __init__(self, served: Served, models: Models, sampler: Sampler) -> None:
        self.served = served
        self.futures = Futures()
        self._models = models
        self._sampler = sampler
        self._base = SamplerWeights(served.directory, "base")
        device = pick_device(0)
        if served.bf16:
            warn_of_emulated_bfloat16(device)
        self._shared = SharedBase(str(served.directory), bf16=served.bf16, device=device)
        self._sessions: dict[str, _Session] = {}
        self._samplers: dict[str, _SamplingSession] = {}

    # Sessions

    def create_session(self, body: Body) -> dict[str, Any]:
        if len(self._sessions) >= MOST_SESSIONS:
            for name in [name for name, each in self._sessions.items() if each.ended or self._is_silent(name)]:
                self._end(name)
                del self._sessions[name]
        name = secrets.token_hex(8)
        self._sessions[name] = _Session()
        warning = {"warning_message": FULL_WEIGHTS} if self.served.full_weights else {}
        return {"type": "create_session", "session_id": name, **warning}

    def heartbeat(self, body: Body) -> dict[str, Any]:
        self._session(body).heard = time.monotonic()
        return {"type": "session_heartbeat"}

    def finish_session(self, name: str) -> None:
        if name in self._sessions:
            self._end(name)

    def _session(self, body: Body) -> _Session:
        name = text(body, "session_id")
        session = self._sessions.get(name)
        if session is None:
            raise NotFound(f"there is no session {name}", field="session_id", value=name)
        if session.ended:
            raise WrongState(f"session {name} has ended", field="session_id", value=name)
        session.heard = time.monotonic()
        return session

    def _is_silent(self, name: str) -> bool:
        session = self._sessions.get(name)
        return session is None or session.ended or time.monotonic() - session.heard > SILENT_SECONDS

    def _end(self, name: str) -> None:
        self._sessions[name].ended = True
        for model in self._models.end(name):
            for number in range(max(1, model.snapshots - self.served.keep + 1), model.snapshots + 1):
                self._drop_snapshot(model, number)

    # Training runs

    def create_model(self, body: Body) -> dict[str, Any]:
        self._session(body)
        self._check_base(text(body, "base_model"))
        lora = body.get("lora_config")
        if not self.served.full_weights:
            return self._add_model(body, None, AdapterRequest.read(lora), optimizer=False)
        for part in ("train_mlp", "train_attn", "train_unembed"):
            if isinstance(lora, dict) and lora.get(part) is False:
                reason = "all weights train with --full-weights"
                raise NotAvailable.unavailable(f"lora_config.{part} false", reason)
        return self._add_model(body, None, None, optimizer=False)

    def load_weights(self, body: Body) -> dict[str, Any]:
        """Creates a model from a checkpoint, or loads a checkpoint into a model."""
        address, optimizer = text(body, "path"), bool(body.get("optimizer"))
        if body.get("session_id") is not None:
            self._session(body)
            if body.get("base_model") is not None:
                self._check_base(text(body, "base_model"))
            return self._add_model(body, address, self._adapter_of(address), optimizer=optimizer)
        model = self._models.find(text(body, "model_id"))

        def load(trained: TrainedModel) -> dict[str, Any]:
            adapter = self._adapter_of(address)
            if (adapter and adapter.answer) != (model.adapter and model.adapter.answer):
                held, own = (_named(each) for each in (adapter, model.adapter))
                raise InvalidField("path", address, f"a checkpoint of {own}, as the model has; this one is of {held}")
            model.trained = self._trained(address, model.adapter, optimizer)
            return {"type": "load_weights", "path": address, "model_id": model.model_id}

        return self._in_turn(model, body, load)

    def _adapter_of(self, address: str) -> AdapterRequest | None:
        """Returns the adapter of a checkpoint. Raises InvalidField, NotFound."""
        run, _ = self.served.store.find(address)
        return AdapterRequest.known(self.served.store.run(run).get("lora"))

    def _add_model(
        self, body: Body, address: str | None, adapter: AdapterRequest | None, *, optimizer: bool
    ) -> dict[str, Any]:
        chosen = body.get("optimizer_config")
        if isinstance(chosen, dict) and chosen.get("type", "adamw") != "adamw":
            raise NotAvailable.unavailable(f"optimizer_config {chosen['type']}", "the optimizer is AdamW")
        session = text(body, "session_id")
        model_id = f"{session}:train:{integer(body, 'model_seq_id', 0)}"
        request_id = f"{model_id}:0"
        if request_id in self.futures:
            return {"request_id": request_id, "model_id": model_id}
        metadata = body.get("user_metadata")
        model = TrainingRun(model_id, session, adapter)

        def make() -> TrainedModel:
            trained = self._trained(address, adapter, optimizer)
            # Part of loading: a model that cannot be recorded is forgotten, and takes no place of another.
            about = metadata if isinstance(metadata, dict) else None
            self.served.store.add_run(model_id, self.served.names[0], about, adapter.about if adapter else None)
            return trained

        async def create() -> dict[str, Any]:
            await self._models.load(model, make)
            log.info("model %s starts with the weights of %s", model_id, address or self.served.names[0])
            return {"type": "create_model" if address is None else "load_weights", "model_id": model_id}

        def begin() -> Awaitable[dict[str, Any]]:
            self._models.add(model, self._is_silent)
            return create()

        self.futures.add(request_id, begin)
        return {"request_id": request_id, "model_id": model_id}

    def _trained(self, address: str | None, adapter: AdapterRequest | None, optimizer: bool) -> TrainedModel:
        start = None if address is None else self.served.store.find(address)[1]
        return TrainedModel(
            str(self.served.directory), bf16=self.served.bf16, start=start, optimizer=optimizer,
            closing=self._models.closing, adapter=adapter, shared=self._shared,
        )  # fmt: skip

    def forward_backward(self, body: bytes) -> dict[str, Any]:
        request = decode_pass(body)
        model = self._models.find(request.model_id)

        def run(trained: TrainedModel) -> bytes:
            try:
                return trained.run(read_pass(request, trained.vocab_size, self.served.context_length))
            except Exception as error:
                if not request.forward_only:
                    trained.fail(f"request {request.seq_id}: {error}")
                raise

        def missed(trained: TrainedModel) -> None:
            if not request.forward_only:
                trained.fail(f"request {request.seq_id}: it was cancelled, or came too late")

        return self._in_turn(model, {"seq_id": request.seq_id}, run, missed)

    def optim_step(self, body: Body) -> dict[str, Any]:
        model = self._models.find(text(body, "model_id"))
        return self._in_turn(model, body, lambda trained: trained.step(read_adam(body)))

    def save_weights(self, body: Body) -> dict[str, Any]:
        model = self._models.find(text(body, "model_id"))

        def save(trained: TrainedModel) -> dict[str, Any]:
            address, path = self.served.store.new(model.model_id, TRAINING, text(body, "path"))
            if path.exists() and not body.get("overwrite"):
                raise WrongState(f"{address} exists already: save with overwrite=True, or another name", field="path")
            trained.save(path)
            return {"type": "save_weights", "path": address}

        return self._in_turn(model, body, save)

    def save_weights_for_sampler(self, body: Body) -> dict[str, Any]:
        """Saves weights: as a checkpoint if they have a name, else as a snapshot with a sampling session of its own."""
        model = self._models.find(text(body, "model_id"))

        def save(trained: TrainedModel) -> dict[str, Any]:
            if body.get("path") is not None:
                address, path = self.served.store.new(model.model_id, SAMPLER, text(body, "path"))
                trained.write(path)
                return {"type": "save_weights_for_sampler", "path": address}
            sampler = f"{model.session}:sample:{integer(body, 'sampling_session_seq_id', 0)}"
            model.snapshots += 1
            path = self._snapshot(model, model.snapshots)
            trained.write(path)
            self._samplers[sampler] = _SamplingSession(SamplerWeights(path, path.name))
            self._drop_snapshot(model, model.snapshots - self.served.keep)
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler}

        return self._in_turn(model, body, save)

    def _snapshot(self, model: TrainingRun, number: int) -> Path:
        return self.served.scratch / f"{model.model_id}:{number}"

    def _drop_snapshot(self, model: TrainingRun, number: int) -> None:
        if number > 0 and self._snapshot(model, number).exists():
            remove_directory(self._snapshot(model, number))

    def _in_turn(self, model: TrainingRun, body: Body, work: Any, missed: Any = None) -> dict[str, Any]:
        number = integer(body, "seq_id", 1)
        request_id = f"{model.model_id}:{number}"
        if request_id not in self.futures:
            self.futures.add(request_id, lambda: self._models.in_turn(model, number, work, missed))
        return {"request_id": request_id, "model_id": model.model_id}

    def get_info(self, body: Body) -> dict[str, Any]:
        model = self._models.find(text(body, "model_id"))
        data = {"arch": None, "model_name": self.served.names[0], "tokenizer_id": str(self.served.directory)}
        return {
            "type": "get_info", "model_data": data, "model_id": model.model_id, "is_lora": model.adapter is not None,
            "lora_rank": model.adapter.rank if model.adapter else None, "model_name": self.served.names[0],
        }  # fmt: skip

    def weights_info(self, body: Body) -> dict[str, Any]:
        address = text(body, "tinker_path")
        run, _ = self.served.store.find(address)
        return {"base_model": self.served.store.run(run)["base_model"], **_described(self._adapter_of(address))}

    def training_run(self, run: str) -> dict[str, Any]:
        about, checkpoints = self.served.store.run(run), list(self.served.store.checkpoints(run))
        newest = {each["checkpoint_type"]: each for each in checkpoints}
        return {
            "training_run_id": run, "base_model": about["base_model"], "model_owner": "local",
            **_described(AdapterRequest.known(about.get("lora"))),
            "last_request_time": about["time"], "user_metadata": about["user_metadata"] or None,
            "last_checkpoint": newest.get("training"), "last_sampler_checkpoint": newest.get("sampler"),
        }  # fmt: skip

    # Samplers

    def create_sampling_session(self, body: Body) -> dict[str, Any]:
        self._session(body)
        name = f"{text(body, 'session_id')}:sample:{integer(body, 'sampling_session_seq_id', 0)}"
        self._samplers[name] = self._sampling(body)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def _sampling(self, body: Body) -> _SamplingSession:
        address = body.get("model_path")
        if address is None:
            self._check_base(text(body, "base_model"))
            return _SamplingSession(self._base)
        _, path = self.served.store.find(text(body, "model_path"))
        # The time is part of the version, because a checkpoint that was saved again has other weights.
        return _SamplingSession(SamplerWeights(path, f"{address}@{path.stat().st_mtime_ns}"), address)

    def sampler(self, name: str) -> dict[str, Any]:
        if name not in self._samplers:
            raise NotFound(f"there is no sampling session {name}", field="sampling_session_id", value=name)
        return {"sampler_id": name, "base_model": self.served.names[0], "model_path": self._samplers[name].model_path}

    def sample(self, body: Body) -> dict[str, Any]:
        """Begins to sample. Raises InvalidField, NotAvailable, NotFound at once, because samples need no order."""
        name = body.get("sampling_session_id")
        if name is None:
            session, request_id = self._sampling(body), secrets.token_hex(8)
        else:
            self.sampler(text(body, "sampling_session_id"))
            session, request_id = self._samplers[str(name)], f"{name}:{integer(body, 'seq_id', 0)}"
        wanted = read_sampling(body, self.served.context_length)
        if request_id not in self.futures:
            self.futures.add(request_id, lambda: self._sample(session.weights, wanted))
        ids = [f"{request_id}:{number}" for number in range(wanted.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    async def _sample(self, weights: SamplerWeights, wanted: Any) -> bytes:
        if not weights.directory.exists():
            raise NotFound(
                f"the weights of this sampling client are gone: the {self.served.keep} newest snapshots of a model are "
                "kept (--keep-snapshots)",
                field="sampling_session_id", value=weights.version,
            )  # fmt: skip
        return await self._sampler.sample(weights, wanted)

    # Everything else

    def capabilities(self) -> dict[str, Any]:
        model = {"max_context_length": self.served.context_length, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": name, **model} for name in self.served.names]}

    def _check_base(self, name: str) -> None:
        if name not in self.served.names:
            raise InvalidField(
                "base_model", name, f"{' or '.join(self.served.names)}, which this service was started with"
            )

    async def close(self) -> None:
        await self.futures.close()
        self._models.close()


def _described(adapter: AdapterRequest | None) -> dict[str, Any]:
    return {"is_lora": False} if adapter is None else {"is_lora": True, **adapter.answer}


def _named(adapter: AdapterRequest | None) -> str:
    return "full weights" if adapter is None else f"a LoRA adapter of rank {adapter.rank}"
