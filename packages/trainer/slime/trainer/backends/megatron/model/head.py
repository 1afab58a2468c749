"""A GPTModel whose head computes logits only for the tokens that need them.

Megatron's own makes logits of every token, and with multi-token prediction it returns a loss in their place. Here the
logits are those of chosen rows, and the loss of multi-token prediction joins the backward pass beside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, roll_tensor
from torch import Tensor

from slime.trainer.algorithms.logprobs import token_log_probs
from slime.trainer.backends.megatron.model import rotary
from slime.trainer.backends.megatron.model.vocabulary import Scoring, real_columns
from slime.types.errors import PluginError


@dataclasses.dataclass(frozen=True)
class Head:
    """A micro-batch as the last stage needs it, beside its input.

    rows: [j] tokens whose logits are wanted; labels, has_label: [1, L] next tokens, for multi-token prediction, which
    takes the vocabulary and the chunks of `scoring`, and no temperature.
    """

    rows: Tensor
    labels: Tensor
    has_label: Tensor
    scoring: Scoring


class PolicyModel(GPTModel):
    """`head` is set before each forward pass with labels=None; logits then are [1, j, V / tensor parallel size].

    Without a head, forward is GPTModel's.
    """

    head: Head | None = None
    # [2] float32, in training: sum of multi-token-prediction losses, number of their tokens. None after a clear.
    prediction_sums: Tensor | None = None
    # [channels of a head] where tokens of images have a position for each axis: that which rotates the channel.
    rotary_axes: Sequence[int] = ()

    def _preprocess(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        hidden, freqs, *rest = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        if freqs is not None and packed_seq_params is not None and not self.config.apply_rope_fusion:
            freqs = rotary.of_row(freqs, packed_seq_params.cu_seqlens_q, self.rotary_axes)
        return hidden, freqs, *rest

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.head is None:
            return super()._postprocess(hidden_states, *args, **kwargs)
        return self._logits(hidden_states, **kwargs)

    def _logits(
        self,
        hidden: Tensor,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        rotary_pos_emb: Any,
        rotary_pos_cos: Any,
        rotary_pos_sin: Any,
        mtp_in_postprocess: bool | None,
        attention_mask: Any = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        assert self.head is not None
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if mtp_in_postprocess:
            hidden = self.mtp(
                input_ids=input_ids, position_ids=position_ids, hidden_states=hidden, attention_mask=attention_mask,
                rotary_pos_emb=rotary_pos_emb, rotary_pos_cos=rotary_pos_cos, rotary_pos_sin=rotary_pos_sin,
                packed_seq_params=packed_seq_params, embedding=self.embedding,
            )  # fmt: skip
        if not self.post_process:
            return hidden
        if self.config.mtp_num_layers:
            hidden = self._with_prediction_loss(hidden, weight, packed_seq_params)
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        # The rows are chosen from the whole sequence, so the layer must not gather it again.
        gathers, self.output_layer.sequence_parallel = self.output_layer.sequence_parallel, False
        try:
            logits, _ = self.output_layer(hidden.index_select(0, self.head.rows), weight=weight)
        finally:
            self.output_layer.sequence_parallel = gathers
        return logits.transpose(0, 1)

    def _with_prediction_loss(self, hidden: Tensor, weight: Tensor | None, packed_seq_params: Any) -> Tensor:
        """Returns the main hidden states, to whose gradient the loss of multi-token prediction adds its own.

        Its layers learn to predict the token after next, and so on, from every token of the row that has one
        (DeepSeek-V3, arXiv 2412.19437, section 2.2).
        """
        assert self.head is not None
        count = self.config.mtp_num_layers
        hidden, *predicted = torch.chunk(hidden, 1 + count, dim=0)
        labels, has_label = self.head.labels, self.head.has_label
        for states in predicted:
            logits, _ = self.output_layer(states, weight=weight)
            labels, _ = roll_tensor(
                labels, shifts=-1, dims=-1, cp_group=self.cp_group, packed_seq_params=packed_seq_params
            )
            has_label, _ = roll_tensor(
                has_label, shifts=-1, dims=-1, cp_group=self.cp_group, packed_seq_params=packed_seq_params
            )
            columns, shard = real_columns(logits[:, 0], self.head.scoring.vocab_size, self.pg_collection.tp)
            loss = -has_label * token_log_probs(columns, labels[0], 1.0, self.head.scoring.chunk, shard)
            if self.training:
                self._record(loss, has_label)
                hidden = MTPLossAutoScaler.apply(hidden, self.config.mtp_loss_scaling_factor / count * loss)
        return hidden

    @torch.no_grad()
    def _record(self, loss: Tensor, has_label: Tensor) -> None:
        both = torch.stack([loss.sum(), has_label.sum()])
        self.prediction_sums = both if self.prediction_sums is None else self.prediction_sums + both


def adopted(model: torch.nn.Module) -> PolicyModel:
    """Returns `model` itself, which a user's function made, with this head. Raises PluginError for no GPTModel."""
    if isinstance(model, PolicyModel):
        return model
    if not isinstance(model, GPTModel):
        raise PluginError(
            f"--custom-model-provider-path: it made a {type(model).__name__}, expected megatron-core's GPTModel",
            field="--custom-model-provider-path",
            value=type(model).__name__,
            expected="a GPTModel of megatron-core",
        )
    cls = type(model)
    # No constructor runs: the head has no parameters.
    model.__class__ = PolicyModel if cls is GPTModel else type(cls.__name__, (PolicyModel, cls), {})
    assert isinstance(model, PolicyModel)
    return model
