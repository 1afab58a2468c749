"""Routing replay: passes over a mixture of experts that send each token to the experts that an earlier pass chose.

The engine and the trainer compute the scores of experts with different kernels. A small difference can send a token to
other experts, and then its log-probs differ a lot. With --use-rollout-routing-replay every pass of the policy uses the
engine's experts; with --use-routing-replay passes that train use those of the pass that computed the old log-probs. The
scores of the experts are always the pass's own, so routers learn as without replay.

Source: "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv 2510.11370.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slime.trainer.batching.packing import PackedBatch
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.errors import NotAvailable

# (values, experts) of a router's own choice, [t, k] each.
Choice = Callable[[], tuple[Tensor, Tensor]]


class LayerRouting:
    """The choice of experts of one layer.

    replayed: [t, k] int64, or None where the layer chooses by itself, as it does where an entry is negative.
    chosen: what was used last.
    """

    def __init__(self, layer: int) -> None:
        """layer: number in the model, from 0; dense layers count."""
        self.layer = layer
        self.replayed: Tensor | None = None
        self.chosen: Tensor | None = None
        self._to_recompute: deque[Tensor | None] = deque()

    def choose(self, scores: Tensor, own_choice: Choice) -> tuple[Tensor, Tensor]:
        """Returns (scores of the chosen experts, their numbers), [t, k] each. scores: [t, experts]."""
        values, experts = own_choice()
        if self.replayed is not None:
            experts = torch.where(self.replayed < 0, experts, self.replayed)
            values = scores.gather(1, experts)
        self.chosen = experts
        return values, experts

    def forward(self, scores: Tensor, own_choice: Choice, *, trains: bool) -> tuple[Tensor, Tensor]:
        """Calls `choose` in a pass whose activations are recomputed: other rows may come between the forward pass
        without gradient and its repetition with one, which has to replay the experts of its own row."""
        if trains and not torch.is_grad_enabled():
            self._to_recompute.append(self.replayed)
        elif self._to_recompute:
            latest, self.replayed = self.replayed, self._to_recompute.popleft()
            found = self.choose(scores, own_choice)
            self.replayed = latest
            return found
        return self.choose(scores, own_choice)

    def clear(self) -> None:
        self.replayed = self.chosen = None
        self._to_recompute.clear()


def replays_routing(settings: TrainerSettings, experts: bool) -> bool:
    """Tells if passes replay experts. Raises NotAvailable for a model without `experts`."""
    flag = "--use-rollout-routing-replay" if settings.use_rollout_routing_replay else "--use-routing-replay"
    if not settings.use_routing_replay and not settings.use_rollout_routing_replay:
        return False
    if not experts:
        raise NotAvailable.requires(flag, "a mixture of experts", "this model has no experts")
    return True


class RoutingReplay:
    """The routers of a model, and what they chose.

    from_rollout: whether samples bring the experts. Calls of an iteration: `begin_iteration`, then in each pass
    `scores` or `trains` once, and for each row `begin`, its forward pass, and `end`.
    """

    def __init__(self, layers: Sequence[LayerRouting], *, from_rollout: bool) -> None:
        self.layers = layers
        self._from_rollout = from_rollout
        # Positions of a row's samples -> [t, k] of each layer. Rows that train are rows that were scored.
        self._recorded: dict[tuple[int, ...], list[Tensor]] = {}
        self.training = False

    def begin_iteration(self) -> None:
        """Forgets what no pass has trained on: where only a critic trains, or an iteration failed, that is all."""
        self._recorded.clear()

    def scores(self) -> None:
        """Begins a pass that computes log-probs of the policy."""
        self._clear(training=False)

    def trains(self) -> None:
        """Begins a pass that trains."""
        self._clear(training=True)

    def _clear(self, *, training: bool) -> None:
        self.training = training
        for layer in self.layers:
            layer.clear()

    def begin(
        self, batch: PackedBatch | None, experts: Tensor | None = None, some: Sequence[LayerRouting] = ()
    ) -> None:
        """Begins the forward pass of a row. experts: [t, layers of the model, k] of the tokens that this rank holds.

        some: the layers that the pass goes through; default: all.
        """
        layers = some or self.layers
        recorded: list[Tensor] | None = None
        if batch is not None and self.training and not self._from_rollout:
            recorded = self._recorded.pop(_key(batch, layers))
        for number, layer in enumerate(layers):
            layer.replayed = recorded[number] if recorded is not None else None
            if batch is not None and self._from_rollout and experts is not None:
                layer.replayed = experts[:, layer.layer].long()

    def end(self, batch: PackedBatch | None, some: Sequence[LayerRouting] = ()) -> None:
        """Ends the forward pass of a row. Raises NotAvailable if no router asked for experts, so none were replayed."""
        layers = some or self.layers
        if batch is not None and all(layer.chosen is None for layer in layers):
            raise NotAvailable(
                "experts of this model cannot be replayed: its routers do not choose those with the largest scores",
                field="--use-rollout-routing-replay" if self._from_rollout else "--use-routing-replay",
            )
        if batch is not None and not self.training and not self._from_rollout:
            chosen = [layer.chosen for layer in layers]
            self._recorded[_key(batch, layers)] = [c.detach() for c in chosen if c is not None]


def _key(batch: PackedBatch, layers: Sequence[LayerRouting]) -> tuple[int, ...]:
    return layers[0].layer, *batch.positions
