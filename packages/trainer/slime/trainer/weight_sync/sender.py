"""Sends weights to the engines, update after update: chooses the transport, feeds it, and compares the result.

Weights that engines hold quantized are quantized before they come to a transport, so that buckets, files and deltas
have the bytes that engines hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slime.converters.convert.quantized import Fp8Form, Int4Form, QuantizedForm, form_of
from slime.trainer.backends.base import Backend
from slime.trainer.checkpoints import checkpoint
from slime.trainer.checkpoints.hf_directory import as_dtype
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings, flat_args
from slime.trainer.weight_sync.base import Weights, WeightTransport
from slime.trainer.weight_sync.broadcasts import Broadcaster
from slime.trainer.weight_sync.deltas.carriers import DiskCarrier, TensorCarrier
from slime.trainer.weight_sync.deltas.nccl_carrier import NcclCarrier
from slime.trainer.weight_sync.deltas.transport import DeltaTransport
from slime.trainer.weight_sync.disk import DiskTransport
from slime.trainer.weight_sync.equality import EqualityCheck
from slime.trainer.weight_sync.ipc import IpcTransport
from slime.trainer.weight_sync.nccl import NcclTransport
from slime.trainer.weight_sync.published import AfterWrite
from slime.trainer.weight_sync.tensor import TensorTransport
from slime.trainer.weight_sync.transaction import Engines, push
from slime.types.clients import Engine
from slime.types.errors import NotAvailable
from slime.types.plugins import load_setting
from slime.types.weight_deltas.checksums import find_checksum
from slime.types.weight_deltas.encoding import zstandard_module


class WeightSender:
    """Sends the policy of `backend` to the engines of a rollout service. Its methods are collective.

    source: directory of the config and tokenizer files for models that are written. args: the namespace that plug-ins
    receive; the trainer's settings without it.

    Raises NotAvailable where a package that deltas need is not installed, and for a quantization of --hf-checkpoint in
    which weights cannot be sent; PluginError, MissingFile, InvalidFile.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        ranks: Ranks,
        backend: Backend,
        rollout: Engines,
        source: Path,
        args: Any = None,
    ) -> None:
        if settings.update_weight_mode == "delta":
            # The first delta is encoded after a rollout and an update, which would be lost.
            zstandard_module()
            find_checksum(settings.update_weight_delta_checksum)
        self._settings = settings
        self._ranks = ranks
        self._backend = backend
        self._rollout = rollout
        self._source = source
        hook = load_setting(settings, "custom_update_weight_post_write_path")
        self._after_write: AfterWrite | None = None
        if hook is not None:
            given = flat_args(settings) if args is None else args
            self._after_write = lambda path, engines: hook(given, str(path), list(engines))
        self._dtype = getattr(torch, settings.wire_dtype)
        self._form: QuantizedForm | None = None
        if settings.update_weight_quantization == "auto":
            self._form = form_of(settings.hf_checkpoint)
        if self._form is not None and backend.device.type == "cuda":
            refuse_other_layouts(self._form, torch.cuda.get_device_capability(backend.device))
        # Kept from update to update, with the connections and buffers that they have built up.
        self._transports: dict[str, WeightTransport] = {}
        self._check: EqualityCheck | None = None
        self.metrics: dict[str, float] = {}
        """Metrics of the last push, on rank 0."""

    def push(self, version: int, release: Callable[[], None] = lambda: None, *, joining: bool = False) -> int:
        """Sends the policy to every engine of the rollout service as `version`; returns the bytes that rank 0 sent.

        release, joining: see `transaction.push`.
        """
        timeout = self._settings.update_weight_timeout_seconds
        send = partial(self._send, version=version)
        return push(self._rollout, self._ranks, version, send, timeout, release, joining=joining)

    def _send(self, engines: Sequence[Engine], version: int) -> int:
        name = transport_for(engines, self._settings)
        if name not in self._transports:
            self._transports[name] = self._make(name)
        transport = self._transports[name]
        if transport.on_every_rank:
            weights = self._backend.named_weights(dtype=self._dtype, everywhere=True)
            stream = self._in_form(weights, on_device=transport.on_device)
            in_place = self._form is None and self._backend.weights_stay(self._dtype)
            sent = transport.send(engines, version, stream, in_place=in_place)
        else:
            weights = self._backend.named_weights(dtype=self._dtype)
            stream = self._in_form(weights, on_device=transport.on_device)
            sent = self._ranks.on_first(lambda: transport.send(engines, version, stream), weights) or 0
        self.metrics = transport.metrics
        if self._settings.check_weight_update_equal:
            self._compare(engines, version)
        return sent

    def _in_form(self, weights: Weights, *, on_device: bool = False) -> Weights:
        """Yields the tensors as engines hold them; on the CPU unless `on_device`. They are quantized where they are."""
        if self._form is None:
            return as_dtype(weights, self._dtype, on_device=on_device)
        stream = self._form.quantized(as_dtype(weights, self._dtype, on_device=True))
        return stream if on_device else ((name, tensor.cpu()) for name, tensor in stream)

    def _compare(self, engines: Sequence[Engine], version: int) -> None:
        s = self._settings
        if self._check is None:
            self._check = EqualityCheck(s.update_weight_disk_dir, self._write_all, s.update_weight_timeout_seconds)
        check = self._check
        weights = self._backend.named_weights(dtype=self._dtype)
        self._ranks.on_first(lambda: check.run(engines, version, self._in_form(weights)), weights)

    def _make(self, name: str) -> WeightTransport:
        s = self._settings
        size, timeout = s.update_weight_buffer_size, s.update_weight_timeout_seconds
        if s.update_weight_mode == "delta":
            carrier: DiskCarrier | NcclCarrier | TensorCarrier = TensorCarrier(size, timeout)
            if name == "nccl":
                if isinstance(self._form, Int4Form):
                    raise NotAvailable.requires(
                        "--update-weight-mode delta", "--update-weight-transport disk",
                        f"SGLang repacks INT4 when it loads --hf-checkpoint {s.hf_checkpoint}, and a delta by NCCL "
                        "applies to weights as they were sent",
                    )  # fmt: skip
                carrier = NcclCarrier(Broadcaster(self._backend.device, timeout), size)
            elif name == "disk":
                assert s.update_weight_disk_dir is not None
                local, keep = s.update_weight_local_checkpoint_dir, s.update_weight_disk_keep_files
                carrier = DiskCarrier(
                    s.update_weight_disk_dir, local, self._write, timeout,
                    keep_files=keep, after_write=self._after_write,
                )  # fmt: skip
            return DeltaTransport(carrier, s.update_weight_delta_encoding, s.update_weight_delta_checksum, size)
        if name == "disk":
            assert s.update_weight_disk_dir is not None
            keep = s.update_weight_disk_keep_files
            return DiskTransport(
                s.update_weight_disk_dir, self._write, timeout, keep_files=keep, after_write=self._after_write
            )
        if name == "ipc":
            return IpcTransport(self._ranks, size, timeout)
        if name == "nccl":
            return NcclTransport(Broadcaster(self._backend.device, timeout), size)
        return TensorTransport(size, timeout)

    def _write_all(self, path: Path, weights: Weights) -> int:
        """Writes the tensors of `_in_form`, and those that are not trained: engines load them in place of noise."""
        return self._write(path, weights, self._backend.untrained_weights())

    def _write(self, path: Path, weights: Weights, untrained: Iterable[str] = ()) -> int:
        """Writes the tensors of `_in_form`."""
        sizes = self._backend.weight_sizes()
        if self._form is None:
            return checkpoint.write_model(path, weights, sizes, self._dtype, self._source, untrained)
        num_bytes = self._form.num_bytes(sizes, self._dtype)
        return checkpoint.write_as_given(path, weights, num_bytes, Path(self._settings.hf_checkpoint), untrained)

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()
        if self._check is not None:
            self._check.close()


def refuse_other_layouts(form: QuantizedForm, capability: tuple[int, int]) -> None:
    """Raises NotAvailable for GPUs on which SGLang lays quantized weights out so that it cannot load them again.

    It packs the factors of FP8 for DeepGEMM on Blackwell, and the weights for Marlin on what is older than Ada. INT4 is
    laid out for Marlin, save on Blackwell, and the plug-in of slime-rollout loads such layers again.
    """
    kind, oldest = ("FP8", (8, 9)) if isinstance(form, Fp8Form) else ("INT4", (8, 0))
    if not oldest <= capability < (10, 0):
        raise NotAvailable.unavailable(
            f"a weight update in {kind} to GPUs of compute capability {capability[0]}.{capability[1]}",
            f"SGLang changes the layout of {kind} there when it loads a model, and cannot load weights in {kind} again",
            "the directory of the model in bfloat16",
        )


def transport_for(engines: Sequence[Engine], settings: TrainerSettings) -> str:
    """Returns the transport to use: for `auto` the best that all engines take. Raises NotAvailable."""
    if settings.update_weight_transport != "auto":
        return settings.update_weight_transport
    shares_gpus = settings.colocate and not settings.rollout_external_engine_addrs
    # Not `disk`: nothing says which directory all of them share.
    possible: tuple[str, ...] = ("tensor", "ipc", "nccl") if shares_gpus else ("tensor", "nccl")
    taken = [engine.weight_transports for engine in engines]
    if settings.update_weight_mode == "delta":
        possible = ("tensor",) if shares_gpus else ("tensor", "nccl")
        taken = [engine.delta_carriers for engine in engines]
    for name in taken[0] if taken else possible:
        if name in possible and all(name in each for each in taken):
            return name
    kinds = ", ".join(sorted({engine.kind for engine in engines}))
    if settings.update_weight_mode == "delta" and not all(taken):
        raise NotAvailable.unavailable(
            "--update-weight-mode delta",
            f"some of the engines ({kinds}) take full updates only; SGLang takes deltas only where this run started it",
            "--update-weight-mode full",
        )
    if settings.update_weight_mode == "delta":
        raise NotAvailable.requires(
            "--update-weight-mode delta",
            "--update-weight-transport disk",
            f"the engines ({kinds}) share no other transport of deltas",
        )
    raise NotAvailable.unavailable(
        "--update-weight-transport auto",
        f"the engines ({kinds}) have at most disk in common",
        "--update-weight-transport disk",
    )
