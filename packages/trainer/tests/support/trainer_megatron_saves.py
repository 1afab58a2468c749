"""Run by test_trainer_megatron_saves in two processes: `trainer_megatron_saves.py RANK WORLD_SIZE DIR MODELS`.

Every layout trains three steps, saves after the second, and resumes from that; then every other layout resumes from it.
"""

import dataclasses
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from trainer_megatron_ranks import CP, EP, PP, SP, TP
from trainer_processes import quick_cases
from trainer_tiny import Runner, make_samples, make_settings

from slime.trainer.backends.build import open_checkpoints
from slime.trainer.checkpoints import checkpoint
from slime.trainer.process.collective import Ranks

# name -> (model, Megatron's arguments, settings of the trainer)
EVERY_LAYOUT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "data": ("dense", {"use_distributed_optimizer": True}, {}),
    "tensor": ("dense", {TP: 2}, {}),
    "pipeline": ("dense", {PP: 2, "num_layers_per_virtual_pipeline_stage": 1}, {"async_save": True}),
    "context": ("dense", {CP: 2}, {}),
    "data-bf16": ("dense", {"use_distributed_optimizer": True}, {"bf16": True}),
    "tensor-bf16": ("dense", {TP: 2, SP: True}, {"bf16": True}),
    "experts": ("experts", {EP: 2}, {}),
    "experts-tensor": ("experts", {TP: 2, SP: True, "use_distributed_optimizer": True}, {}),
}
LAYOUTS = quick_cases(EVERY_LAYOUT, {"context"})


class Run(Runner):
    """Three steps; `keep` saves, `resume` loads."""

    def __init__(self, layout: str, ranks: Ranks, models: Path, load: Path | None = None) -> None:
        model, megatron, values = LAYOUTS[layout]
        path = str(models / model)
        settings = make_settings(path, train_backend="megatron", max_tokens_per_gpu=60, **values)
        if load is not None:
            settings = dataclasses.replace(settings, load=str(load))
        super().__init__(settings, ranks, weights=settings.load, megatron=megatron)
        self.checkpoints = open_checkpoints(settings, self.backend, ranks, Path(path))
        self.state = checkpoint.TrainerState()
        if load is not None:
            self.state = checkpoint.read_state(str(load))
            self.checkpoints.load(str(load), self.state)

    def train(self, step: int) -> dict[str, float]:
        metrics = self.run(step, make_samples(step, groups=4, size=4))
        self.state = dataclasses.replace(self.state, step=step, updates=self.backend.updates)
        return {name: value for name, value in metrics.items() if name.startswith("train/")}


def run(layout: str, ranks: Ranks, directory: Path, models: Path) -> None:
    from slime.trainer.backends.megatron.model import parallel

    results: dict[str, Any] = {}
    straight = Run(layout, ranks, models)
    for step in range(2):
        straight.train(step)
    path = directory / layout / "iter_0000001"
    straight.checkpoints.save(path, straight.state)
    results["straight"] = straight.train(2)
    assert straight.checkpoints.finish(wait=True) == 1
    weights = straight.weights()
    parallel.destroy()
    for other in LAYOUTS:
        if LAYOUTS[other][0] != LAYOUTS[layout][0] or ("bf16" in other) != ("bf16" in layout):
            continue
        resumed = Run(other, ranks, models, path)
        results[other] = resumed.train(2)
        again = resumed.weights()
        if ranks.rank == 0:
            differing = [name for name, weight in weights.items() if not torch.equal(weight, again[name])]
            results[f"{other}-differing"] = differing
            apart = max(float(((w - again[n]).abs() > 1e-3).float().mean()) for n, w in weights.items())
            results[f"{other}-apart"] = apart
        parallel.destroy()
    if ranks.rank == 0:
        save_file(weights, directory / f"{layout}.safetensors")
        (directory / f"{layout}.json").write_text(json.dumps(results))


def main() -> None:
    rank, world_size, directory, models = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    ranks = Ranks(rank, world_size, f"file://{directory}/rendezvous", 2)
    for layout in LAYOUTS:
        try:
            run(layout, ranks, directory, models)
        except Exception:
            # Whatever is left of the layout on the other rank would wait for this one.
            (directory / f"{layout}-{rank}.error").write_text(traceback.format_exc())
            raise
    ranks.close()


if __name__ == "__main__":
    main()
