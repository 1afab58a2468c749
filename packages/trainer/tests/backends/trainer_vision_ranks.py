"""Run in two processes by test_trainer_images: `python trainer_vision_ranks.py RANK WORLD_SIZE DIR MODEL KIND`."""

import sys

import torch
from safetensors.torch import save_file
from trainer_tiny import Runner, make_settings
from trainer_tiny_vision import make_image_samples

from slime.trainer.process.collective import Ranks

if __name__ == "__main__":
    rank, world_size, directory, model, kind = sys.argv[1:]
    torch.set_num_threads(1)
    ranks = Ranks(int(rank), int(world_size), f"file://{directory}/rendezvous", 2, "cpu")
    # Two micro-batches: images for the first rank, text for the second.
    runner = Runner(make_settings(model, train_vision=True, micro_batch_size=2, use_dynamic_batch_size=False), ranks)
    runner.run(0, make_image_samples(kind)[4:])
    weights = runner.weights()
    if ranks.rank == 0:
        save_file(weights, f"{directory}/weights.safetensors")
    ranks.close()
