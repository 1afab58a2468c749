"""Bytes and seconds of weight updates that hold what changed, beside those of all weights, to one embedded engine.

    python benchmarks/trainer/weight_deltas.py --hf-checkpoint DIR          # SmolLM2-135M, say
    python benchmarks/trainer/weight_deltas.py                              # random weights of SmolLM2-135M's shape
    python benchmarks/trainer/weight_deltas.py --learning-rate 1e-5 --encoding overwrite --dtype float32

The model trains in float32: before each update AdamW makes one step on the cross entropy of random tokens, at a
learning rate of reinforcement learning. The engine, a process of its own, holds the type in which weights are sent.
The same version goes to it as a delta and then as a whole, by each transport.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.trainer.checkpoints.checkpoint import write_model
from slime.trainer.checkpoints.hf_directory import as_dtype
from slime.trainer.weight_sync.base import Weights, WeightTransport
from slime.trainer.weight_sync.deltas.carriers import DiskCarrier, TensorCarrier
from slime.trainer.weight_sync.deltas.transport import DeltaTransport
from slime.trainer.weight_sync.disk import DiskTransport
from slime.trainer.weight_sync.tensor import TensorTransport
from slime.types.clients import Engine
from slime.types.weight_deltas.checksums import CHECKSUMS
from slime.types.weight_deltas.encoding import OPERATIONS

SHAPE = dict(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True, eos_token_id=2,
)  # fmt: skip
BUCKET_BYTES = 512 << 20
TIMEOUT_SECONDS = 600.0


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.hf_checkpoint or make_model(Path(temporary) / "model")
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
        engine_options = EmbeddedOptions(model_path=directory, dtype=options.dtype, threads=options.threads)
        with start_embedded(engine_options) as process:
            process.wait_ready(600)
            engine = Engine(
                process.name, process.url, process.kind, True, 0,
                weight_transports=("tensor", "disk"), delta_carriers=("tensor", "disk"),
            )  # fmt: skip
            for name in ("tensor", "disk"):
                both = transports(name, options, model, directory, temporary)
                report(name, measure(both, engine, model, optimizer, options))


def transports(
    name: str, options: argparse.Namespace, model: Any, source: str, temporary: str
) -> tuple[DeltaTransport, WeightTransport]:
    sizes = {key: tensor.numel() for key, tensor in model.named_parameters()}
    dtype = getattr(torch, options.dtype)

    def write(path: Path, weights: Weights) -> int:
        return write_model(path, weights, sizes, dtype, Path(source))

    if name == "tensor":
        carrier: Any = TensorCarrier(BUCKET_BYTES, TIMEOUT_SECONDS)
        whole: WeightTransport = TensorTransport(BUCKET_BYTES, TIMEOUT_SECONDS)
    else:
        carrier = DiskCarrier(f"{temporary}/deltas", None, write, TIMEOUT_SECONDS)
        whole = DiskTransport(f"{temporary}/whole", write, TIMEOUT_SECONDS)
    return DeltaTransport(carrier, options.encoding, options.checksum, BUCKET_BYTES), whole


def measure(
    both: tuple[DeltaTransport, WeightTransport], engine: Engine, model: Any, optimizer: Any, options: Any
) -> dict[str, float]:
    """Returns medians over the updates."""
    delta, whole = both
    dtype = getattr(torch, options.dtype)
    found: dict[str, list[float]] = defaultdict(list)

    def weights() -> list[tuple[str, torch.Tensor]]:
        # A trainer with --bf16 has them in this type.
        return list(as_dtype(model.named_parameters(), dtype))

    delta.send([engine], 1, iter(weights()))
    for version in range(2, 2 + options.updates):
        step(model, optimizer, options.tokens)
        holder = dataclasses.replace(engine, weight_version=version - 1)
        held = weights()
        for kind, transport in (("delta", delta), ("whole", whole)):
            seconds, sent = timed(lambda: transport.send([holder], version, iter(held)))  # noqa: B023
            found[f"{kind} bytes"].append(sent)
            found[f"{kind} seconds"].append(seconds)
        assert delta.metrics["perf/update_weights_whole_engines"] == 0
        found["changed"].append(delta.metrics["perf/update_weights_changed"])
    delta.close()
    whole.close()
    return {key: statistics.median(values) for key, values in found.items()}


def step(model: Any, optimizer: Any, tokens: int) -> None:
    ids = torch.randint(10, model.config.vocab_size, (1, tokens))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def timed(work: Callable[[], int]) -> tuple[float, int]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def report(transport: str, found: dict[str, float]) -> None:
    row: dict[str, Any] = {
        "transport": transport,
        **found,
        "bytes, of whole": found["delta bytes"] / found["whole bytes"],
        "seconds, of whole": found["delta seconds"] / found["whole seconds"],
    }
    shown = {key: value if isinstance(value, str) else round(value, 5) for key, value in row.items()}
    print(json.dumps(shown), flush=True)


def make_model(directory: Path) -> str:
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="a").save_pretrained(directory)
    return str(directory)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-checkpoint", metavar="DIR")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="Tokens of a step of AdamW")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--encoding", choices=OPERATIONS, default="xor")
    parser.add_argument("--checksum", choices=CHECKSUMS, default="xxh3-128")
    parser.add_argument("--threads", type=int, default=1, help="Threads of the engine")
    return parser.parse_args()


if __name__ == "__main__":
    main()
