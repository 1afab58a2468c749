"""The Megatron backend: megatron-core's model, schedule and optimizer behind the calls that a step makes."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from slime.converters.megatron.rank_layout import check_images, sizes_of
from slime.trainer.algorithms.fused_log_probs import FusedLogProbs
from slime.trainer.backends.base import (
    POLICY,
    REFERENCE,
    TEACHER,
    TRAINING,
    WEIGHTS,
    Backend,
    LossFunction,
    MaybeBatch,
    Outputs,
)
from slime.trainer.backends.megatron import fp8, vision
from slime.trainer.backends.megatron.hooks import Hooks
from slime.trainer.backends.megatron.model import aux_losses, parallel, routing
from slime.trainer.backends.megatron.model.build import build_model, compile_layers
from slime.trainer.backends.megatron.model.config import transformer_config, uses_transformer_engine
from slime.trainer.backends.megatron.model.forward import Pipeline
from slime.trainer.backends.megatron.model.head import PolicyModel, adopted
from slime.trainer.backends.megatron.model.vocabulary import Scoring
from slime.trainer.backends.megatron.optim.optimizer import Optimizer, distributed, freeze
from slime.trainer.backends.megatron.weights import hf, initial
from slime.trainer.backends.megatron.weights.export import Part, gather
from slime.trainer.backends.routing import replays_routing
from slime.trainer.backends.snapshots import Snapshots
from slime.trainer.checkpoints.hf_directory import NamedTensors
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.errors import WrongState
from slime.types.models.experts import Experts
from slime.types.models.vision import trained_vision

log = logging.getLogger(__name__)


class MegatronBackend(Backend):
    """A backend over megatron-core. args: Megatron's arguments by attribute name, the model's and the user's; config:
    the object of config.json."""

    name = "megatron"
    # True if other models may be loaded to compare the policy with.
    _has_references = True
    _replays_routing = True
    _pipeline_class = Pipeline

    def __init__(
        self,
        settings: TrainerSettings,
        ranks: Ranks,
        device: torch.device,
        args: Mapping[str, Any],
        config: Mapping[str, Any],
        weights_from: str | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        """weights_from: a Hugging Face or a torch_dist directory in place of `settings.hf_checkpoint`."""
        self.settings = settings
        self.ranks = ranks
        self.device = device
        self.args = dict(args)
        self.config = config
        self.hooks = hooks or Hooks()
        self.vision = trained_vision(config, settings.train_vision)
        if self.vision is not None:
            sizes = sizes_of(self.args, ranks.world_size)
            check_images(self.args, config, sizes, own_model=self.hooks.model_provider is not None)
        self._initialize()
        dtype = torch.bfloat16 if settings.bf16 else torch.float32
        fp8.require(self.args, device, bf16=bool(settings.bf16))
        self.transformer = transformer_config(self.args, params_dtype=dtype)
        fp8.check_recipe(self.transformer)
        # Losses carry their denominators: gradients are added up, over micro-batches and over replicas.
        self.transformer.calculate_per_token_loss = True
        aux_losses.use_whole_rows(self.transformer)
        # Two virtual stages of a rank may talk to the same neighbour at once, and Megatron would mix up their shapes.
        self.transformer.variable_seq_lengths = self.transformer.virtual_pipeline_model_parallel_size is None
        if self.vision is not None:
            # The kernel knows one position of a token.
            self.transformer.apply_rope_fusion = False
        chunks = self._build()
        fp8.check_weights(chunks, self.transformer)
        for chunk in chunks:
            chunk.to(device)
        wanted = settings.compile and not self.hooks.model_provider and self.vision is None
        budget = settings.activation_memory_budget
        compiler = compile_layers(chunks, self.args, self.transformer, budget) if wanted else None
        self.snapshots = Snapshots(chunks)
        if settings.needs_reference and self._has_references:
            reference = settings.ref_load or settings.hf_checkpoint
            initial.load(chunks, self.args, config, reference, flag="--ref-load")
            self.snapshots.keep(REFERENCE)
        if settings.loads_teacher and self._has_references:
            assert settings.opd_teacher_load is not None
            initial.load(chunks, self.args, config, settings.opd_teacher_load, flag="--opd-teacher-load")
            self.snapshots.keep(TEACHER)
        self._load(chunks, weights_from)
        freeze(chunks, settings, ranks)
        self.models = chunks
        self.chunks = distributed(parallel.mixed_precision(chunks, self.transformer), self.args, settings)
        self.optimizer = Optimizer(self.chunks, self.args, settings)
        self.optimizer.zero_grad()
        replays = self._replays_routing and replays_routing(settings, bool(self.transformer.num_moe_experts))
        if replays:
            self.routing = routing.attach(chunks, from_rollout=settings.use_rollout_routing_replay)
            # It chooses inside a kernel.
            self.transformer.moe_router_fusion = False
        if replays and settings.use_rollout_routing_replay:
            t = self.transformer
            self.replayed_experts = Experts(t.num_layers, t.moe_router_topk, t.num_moe_experts or 0)
        scoring = Scoring(int(self.args["vocab_size"]), settings.rollout_temperature, settings.log_probs_chunk_size)
        self._pipeline = self._pipeline_class(
            self.chunks, self.transformer, scoring, device,
            row_multiple=math.lcm(settings.data_pad_size_multiplier, fp8.row_multiple(self.transformer)),
            recompute=settings.recompute_loss_function,
            fused=FusedLogProbs(compiler.function) if compiler is not None else None, routing=self.routing,
            image_token=self.vision.image_token if self.vision is not None else -1,
        )  # fmt: skip
        self.can_share_prompts = self._can_share_prompts()
        self._describe()

    def _initialize(self) -> None:
        """Makes the process groups."""
        parallel.initialize(self.args, self.ranks, seed=self.settings.seed)
        self.hooks.after_initialization()

    def _build(self) -> list[torch.nn.Module]:
        """Builds this rank's chunks, with any weights."""
        provider = self.hooks.model_provider
        model = PolicyModel if self.vision is None else partial(vision.VisionModel, vision=self.config)
        return [adopted(chunk) for chunk in build_model(self.args, self.transformer, provider=provider, model=model)]

    def _load(self, chunks: list[torch.nn.Module], weights_from: str | None) -> None:
        """Loads the weights that training begins with."""
        initial.load(chunks, self.args, self.config, weights_from or self.settings.hf_checkpoint, flag="--load")

    def _describe(self) -> None:
        self.updates = 0
        self._micro_batches = 0
        self._shapes = hf.hf_shapes(self.args, self.config)
        self.vocab_size = int(self.args["vocab_size"])
        self.hidden_size = self.transformer.hidden_size
        self.replica = parallel_state.get_data_parallel_rank()
        self.replicas = parallel_state.get_data_parallel_world_size()
        self.leads_replica = (
            parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
            and parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        )
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        # The interleaved schedule runs micro-batches in groups of the number of stages.
        self.micro_batch_multiple = stages if len(self.chunks) > 1 else 1
        self.needs_every_sample = bool(self.transformer.num_moe_experts or self.transformer.mtp_num_layers)
        self.num_parameters = sum(self.weight_sizes().values())

    def _can_share_prompts(self) -> bool:
        t = self.transformer
        reasons = {
            "Transformer Engine's attention takes whole sequences": uses_transformer_engine(self.args),
            "--context-parallel-size cuts whole sequences": t.context_parallel_size > 1,
            "routers and layers that predict ahead have losses over every token": t.num_moe_experts or t.mtp_num_layers,
            "delta nets carry a state from token to token": t.linear_attention_freq,
            "--custom-model-provider-path decides about attention": self.hooks.model_provider,
        }
        found = [reason for reason, applies in reasons.items() if applies]
        if found:
            log.info("prompts and turns that samples have in common are laid out for each of them: %s", found[0])
        return not found

    def begin_update(self, step: int, update: int) -> None:
        self.hooks.before_train_step(step, update, self.chunks, self.optimizer.wrapped)

    def scores(self, batches: Sequence[MaybeBatch], *, of: str = POLICY, entropy: bool = False) -> list[Outputs | None]:
        if not batches:
            return []
        if of == POLICY:
            self.hooks.before_log_probs(self.chunks, "")
            return self._scores(batches, entropy)
        if of not in self.snapshots:
            raise WrongState("no reference model was loaded" if of == REFERENCE else f"no weights were kept as {of}")
        self.optimizer.settle()
        with self.snapshots.swapped_in(of):
            self.hooks.before_log_probs(self.chunks, {REFERENCE: "ref_", TEACHER: "teacher_"}.get(of, ""))
            return self._scores(batches, entropy, replays=of not in (REFERENCE, TEACHER))

    def _scores(self, batches: Sequence[MaybeBatch], entropy: bool, *, replays: bool = True) -> list[Outputs | None]:
        for chunk in self.chunks:
            chunk.eval()
        return self._pipeline.scores(batches, entropy=entropy, replays=replays)

    def keep(self, name: str) -> None:
        self.optimizer.settle()
        self.snapshots.keep(name)

    def drop(self, name: str) -> None:
        self.snapshots.drop(name)

    def reset_optimizer(self) -> None:
        self.optimizer.reset()
        self.moment_updates = 0

    def device_tensors(self, part: str) -> Iterator[tuple[Tensor, bool]]:
        if part == WEIGHTS:
            self.optimizer.settle()
            for model in self.models:
                yield from ((tensor.detach(), True) for tensor in (*model.parameters(), *model.buffers()))
            return
        assert part == TRAINING
        # Between updates gradients are zero; those of the parameters are parts of these.
        for chunk in self.chunks:
            yield from ((b.grad_data, False) for b in (*chunk.buffers, *chunk.expert_parallel_buffers))
        yield from ((tensor, True) for tensor in self.optimizer.tensors())

    def forward_backward(
        self, batches: Sequence[MaybeBatch], loss: LossFunction, *, entropy: str = "none", logits: bool = False
    ) -> None:
        aux_losses.clear(self.chunks)
        self._micro_batches = len(batches)
        if not batches:
            return
        for chunk in self.chunks:
            chunk.train()
        self.optimizer.scale = self._loss_scale(batches)
        self._pipeline.train(batches, loss, entropy, self.optimizer.scale, logits=logits)

    def model_losses(self) -> dict[str, float]:
        if not self.needs_every_sample:
            return {}
        return aux_losses.means(self.chunks, self.ranks, self._micro_batches)

    def _loss_scale(self, batches: Sequence[MaybeBatch]) -> float:
        """Returns the tokens of the update where a model has losses of its own, which are sums over tokens; else 1.

        Multiplying the policy's loss with it and dividing all gradients by it makes those means over tokens.
        """
        if not self.needs_every_sample:
            return 1.0
        tokens = sum(batch.tokens.shape[1] for batch in batches if batch is not None) if self.leads_replica else 0
        return max(1.0, self.ranks.add_numbers({"tokens": float(tokens)})["tokens"])

    def optimizer_step(self) -> tuple[float, float]:
        result = self.optimizer.step(self.updates)
        self.updates += 1
        self.moment_updates += 1
        return result

    def named_weights(self, *, dtype: torch.dtype | None = None, everywhere: bool = False) -> NamedTensors:
        self.optimizer.settle()
        parts = hf.export_slices(self.models, self.args, self.config)
        yield from self._gathered(parts, dtype=dtype, everywhere=everywhere)

    def named_gradients(self) -> NamedTensors:
        """Yields gradients in the form of `named_weights`; a buffer has none and stands for itself."""

        def gradient(tensor: Tensor) -> Tensor:
            return getattr(tensor, "main_grad", tensor)

        yield from self._gathered(hf.export_slices(self.models, self.args, self.config, gradient))

    def _gathered(
        self, parts: Iterable[Part], *, dtype: torch.dtype | None = None, everywhere: bool = False
    ) -> NamedTensors:
        bucket = self.settings.update_weight_buffer_size
        return gather(list(parts), self._shapes, self.ranks, self.device, bucket, dtype=dtype, everywhere=everywhere)

    def untrained_weights(self) -> list[str]:
        names = hf.hf_names_left_out(self.args, self.config)
        return names + hf.hf_names_untrained(self.settings.hf_checkpoint, self.config)

    def weight_sizes(self) -> dict[str, int]:
        return {name: math.prod(shape) for name, shape in self._shapes.items()}
