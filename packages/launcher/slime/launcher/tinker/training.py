"""A model that is trained by requests: passes that accumulate gradients, and optimizer steps that use them.

Its backend is the trainer's, with the trainer's packed rows and log-probs. A LoRA adapter trains, or all weights. Used
on one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime.converters.files.adapter import ADAPTER_DIR
from slime.launcher.tinker.adapters import AdapterRequest, SharedBase, layers_of
from slime.launcher.tinker.losses import check_config, find_loss
from slime.launcher.tinker.requests import Adam, Datum, PassRequest
from slime.launcher.tinker.results import encode_pass
from slime.launcher.tinker.rows import Row, make_rows
from slime.trainer.backends.base import Outputs
from slime.trainer.backends.fsdp.backend import FsdpBackend
from slime.trainer.backends.fsdp.optimizer import AdamWStep
from slime.trainer.checkpoints.checkpoint import (
    HuggingFaceCheckpoints,
    TrainerState,
    read_state,
    save_checkpoint,
    write_model,
)
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.trainer import pick_device, prepare_process
from slime.types.errors import InvalidField, Unavailable, WrongState
from slime.types.settings import build


class TrainedModel:
    """A model in training. start: a checkpoint or snapshot to begin with in place of the base model; optimizer: load
    the checkpoint's optimizer, too. closing: once it is set, a pass stops after the row that it computes. adapter: the
    LoRA adapter that trains, on a model of `shared`; None trains all weights."""

    def __init__(
        self,
        base: str,
        *,
        bf16: bool = False,
        start: Path | None = None,
        optimizer: bool = False,
        closing: threading.Event | None = None,
        adapter: AdapterRequest | None = None,
        shared: SharedBase | None = None,
    ) -> None:
        state = read_state(str(start)) if start is not None and optimizer else None
        if state is not None and not state.has_optimizer:
            raise WrongState(f"{start} holds weights only: load it without the optimizer", field="optimizer")
        self._closing = closing or threading.Event()
        device = pick_device(0)
        values: dict[str, Any] = {"hf_checkpoint": base, "train_backend": "fsdp", "bf16": bf16, "compile": False}
        model = None
        if adapter is not None:
            model = (shared or SharedBase(base, bf16=bf16, device=device)).model()
            values |= {"lora_rank": adapter.rank, "lora_target_modules": layers_of(model, adapter)}
            if adapter.seed is not None:
                values["seed"] = adapter.seed
            if start is not None and (start / ADAPTER_DIR).is_dir():
                # Weights for samplers are merged, and have the adapter below them.
                start = start / ADAPTER_DIR
        settings: TrainerSettings = build(TrainerSettings, values)
        prepare_process(settings)
        self._base = Path(base)
        self._ranks = Ranks(0, 1, "", 1.0)
        self._backend = FsdpBackend(
            settings.on(device.type), self._ranks, device, None if start is None else str(start), model
        )
        if state is not None:
            HuggingFaceCheckpoints(self._backend, self._ranks, self._base).load(str(start), state)
        # The error of a pass since the last step: the next step would lack its gradients.
        self._failed: str | None = None

    @property
    def vocab_size(self) -> int:
        return self._backend.vocab_size

    @property
    def updates(self) -> int:
        return self._backend.updates

    def run(self, work: PassRequest) -> bytes:
        """Returns the encoded result of a pass. Raises InvalidField, NotAvailable."""
        loss = find_loss(work.loss_fn)
        config = check_config(work.loss_fn, work.config)
        inputs = [_loss_inputs(i, datum, loss.inputs, work.loss_fn) for i, datum in enumerate(work.data)]
        trains = [not work.forward_only and (loss.share is None or bool(each[loss.share].any())) for each in inputs]
        log_probs_of: list[Any] = [None] * len(inputs)
        total = 0.0

        def rows_of(trained: bool) -> list[Row]:
            chosen = [number for number, each in enumerate(trains) if each == trained]
            share, device = self._backend.can_share_prompts, self._backend.device
            return list(make_rows(work.data, share=share, device=device, of=chosen))

        def take(row: Row, outputs: Outputs) -> Tensor:
            nonlocal total
            if self._closing.is_set():
                raise Unavailable("the service ends")
            together = {name: row.joined([each[name] for each in inputs]) for name in loss.inputs}
            on_device = {name: torch.from_numpy(values).to(self._backend.device) for name, values in together.items()}
            value = loss.terms(outputs.log_probs, on_device, config).sum()
            total += float(value.detach())
            log_probs = row.divided(outputs.log_probs.detach().float().cpu().numpy())
            for number, values in zip(row.data, log_probs, strict=True):
                log_probs_of[number] = values
            return value

        # Data without a share in the loss have no gradient: those of a group whose rewards are all equal.
        for row in rows_of(trained=False):
            (outputs,) = self._backend.scores([row.batch])
            assert outputs is not None
            take(row, outputs)
        if rows := rows_of(trained=True):
            self._backend.forward_backward(
                [row.batch for row in rows], lambda number, _, outputs: take(rows[number], outputs)
            )
        return encode_pass(log_probs_of, {"loss:sum": total})

    def fail(self, message: str) -> None:
        """Records that a pass was not computed, so that the next step, which would lack its gradients, fails."""
        self._backend.drop_gradients()
        self._failed = message

    def step(self, adam: Adam) -> dict[str, Any]:
        """Does one optimizer step; returns its metrics. Raises WrongState once after a failed pass, NonFiniteGradient;
        the weights stay as they are then."""
        if self._failed is not None:
            failed, self._failed = self._failed, None
            self._backend.drop_gradients()
            raise WrongState(f"the gradients of an earlier forward_backward are missing, which failed: {failed}")
        parameters = AdamWStep(
            adam.learning_rate, adam.beta1, adam.beta2, adam.eps, adam.weight_decay, adam.grad_clip_norm
        )
        norm = self._backend.adamw_step(parameters)
        return {"metrics": {"grad_norm": norm, "learning_rate": adam.learning_rate}}

    def save(self, path: Path) -> None:
        """Writes weights and optimizer as a checkpoint of the trainer. Raises OutOfSpace, InvalidSetting."""
        state = TrainerState(updates=self._backend.updates)
        save_checkpoint(path, self._backend, self._ranks, state, self._base)

    def write(self, path: Path) -> None:
        """Writes only the weights, as a Hugging Face directory that engines load; below it, the adapter that it is
        merged with."""
        dtype = torch.bfloat16 if self._backend.settings.bf16 else torch.float32
        weights, sizes = self._backend.named_weights(dtype=dtype), self._backend.weight_sizes()
        write_model(path, weights, sizes, dtype, self._base, adapter=self._backend.adapter())


def _loss_inputs(
    number: int, datum: Datum, wanted: Mapping[str, float | None], loss_fn: str
) -> Mapping[str, np.ndarray]:
    for name in datum.inputs:
        if name not in wanted:
            raise InvalidField(
                f"data[{number}].{name}", "given", f"nothing: {loss_fn} takes target_tokens, {', '.join(wanted)}"
            )
    arrays = {}
    for name, default in wanted.items():
        if name in datum.inputs:
            arrays[name] = datum.inputs[name]
        elif default is not None:
            arrays[name] = np.full(len(datum.tokens), default, dtype=np.float32)
        else:
            raise InvalidField(f"data[{number}].{name}", "nothing", f"a number for each token, which {loss_fn} needs")
    return arrays
