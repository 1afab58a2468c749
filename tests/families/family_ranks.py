"""Run in one and in two processes by test_megatron_logits: `python family_ranks.py RANK WORLD_SIZE DIR LAYOUT,...`.

DIR holds what `hf_reference` makes: a directory per family. Writes DIR/LAYOUT-RANK.json: what is off, by family.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_reference import GRADIENT_LAYOUTS, LAYERS, LAYOUTS, LENGTHS, sequences
from slime.converters.families import find_family, read_config
from slime.trainer.backends.megatron.model import parallel
from slime.trainer.backends.megatron.model.build import build_model
from slime.trainer.backends.megatron.model.config import transformer_config
from slime.trainer.backends.megatron.model.head import Head
from slime.trainer.backends.megatron.model.names import unwrapped
from slime.trainer.backends.megatron.model.row import cut
from slime.trainer.backends.megatron.model.vocabulary import Scoring
from slime.trainer.backends.megatron.weights.hf import export_slices, hf_shapes, load_hf
from slime.trainer.batching.packing import PackedBatch
from slime.trainer.batching.runs import Runs
from slime.trainer.process.collective import Ranks

GRADIENT_TOLERANCE = 2e-5
# Delta nets divide their output by its size, also where it is almost 0.
GATED_TOLERANCE = 1e-3


def applies(layout: str, args: dict[str, Any]) -> bool:
    """Tells if the family's model can be laid out so: experts with tensor parallelism need sequence parallelism."""
    experts = bool(args.get("num_experts"))
    if "expert_model_parallel_size" in LAYOUTS[layout]:
        return experts
    return not (experts and layout == "tp")


def check(family: Path, layout: str) -> dict[str, Any]:
    """Returns deviations: logits and gradients relative to the largest value, and tensors that export differently."""
    config = read_config(family / "fp32")
    args = find_family(config).arguments(config) | LAYOUTS[layout]
    if not applies(layout, args):
        return {"applies": False}
    found: dict[str, Any] = {}
    for kind, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        transformer = transformer_config(args, params_dtype=dtype)
        transformer.calculate_per_token_loss = True
        chunks = build_model(args, transformer)
        load_hf(chunks, args, config, family / kind)
        if kind == "fp32":
            reference = load_file(family / "reference.safetensors")
            found["logits"] = logits_error(chunks, transformer, reference)
            if layout in GRADIENT_LAYOUTS:
                found["gradients"] = gradient_errors(chunks, transformer, args, config, family, reference)
        found[kind] = export_errors(chunks, args, config, family / kind)
    return found


@torch.no_grad()
def logits_error(chunks: list[Any], config: Any, reference: dict[str, Tensor]) -> float | None:
    """None on stages that have no logits."""
    for chunk in chunks:
        chunk.eval()
    logits = run(chunks, row_here(config, reference), config)
    if logits is None:
        return None
    whole = [torch.empty_like(logits) for _ in range(config.tensor_model_parallel_size)]
    dist.all_gather(whole, logits.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    wanted = reference["logits"][held_here(config)]
    got = torch.cat(whole, dim=-1)[: len(wanted), : wanted.shape[1]]
    return float((got - wanted).abs().max() / reference["logits"].abs().max())


def gradient_errors(
    chunks: list[Any], config: Any, args: dict[str, Any], hf_config: Any, family: Path, reference: dict[str, Tensor]
) -> dict[str, float]:
    """By tensor, on rank 0: of the sum of logits times weights against transformers, and of the loss of
    multi-token-prediction layers, which transformers does not have, against one rank alone."""
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), chunks[0])
    ddp.train()
    whole = gradients(ddp, config, args, hf_config, reference, ahead=0.0)
    wanted = read_all(family / "gradient")
    errors = compared({name: tensor for name, tensor in whole.items() if name in wanted}, wanted)
    if config.mtp_num_layers:
        whole = gradients(ddp, config, args, hf_config, reference, ahead=1.0)
        if not (family / "ahead").exists() and whole:
            (family / "ahead").mkdir()
            save_file(whole, family / "ahead" / "model.safetensors")
            assert all(
                bool(tensor.any()) for name, tensor in whole.items() if "eh_proj" in name or "input_proj" in name
            )
        errors |= compared(whole, read_all(family / "ahead")) if whole else {}
    return errors


def gradients(
    ddp: Any, config: Any, args: dict[str, Any], hf_config: Any, reference: dict[str, Tensor], *, ahead: float
) -> dict[str, Tensor]:
    """ahead: 0 for logits times `reference["weights"]`, 1 for the multi-token-prediction loss in its place."""
    ddp.zero_grad_buffer()
    # Replicas have the same tokens: each has its part of the loss.
    share = 1.0 / parallel_state.get_data_parallel_world_size()
    MTPLossAutoScaler.set_loss_scale(torch.tensor(share))
    logits = run([ddp], row_here(config, reference), config, ahead=ahead)
    assert logits is not None
    held = held_here(config)
    first = logits.shape[1] * parallel_state.get_tensor_model_parallel_rank()
    weights = reference["weights"][held][:, first : first + logits.shape[1]]
    (logits[: len(held), : weights.shape[1]] * weights * share * (1 - ahead)).sum().backward()
    finalize_model_grads([ddp], None)
    parts = export_slices(
        [ddp.module], args, hf_config, of=lambda tensor: getattr(tensor, "main_grad", torch.zeros_like(tensor))
    )
    return gathered([(name, shape, index, part.clone()) for name, shape, index, part in parts]) or {}


def compared(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference as a part of the largest value, where it is too large; a router's bias has no gradient."""
    errors = {}
    for name, tensor in got.items():
        if not name.endswith("e_score_correction_bias"):
            scale = wanted[name].abs().max().clamp_min(1e-6)
            errors[name] = float((tensor - wanted[name]).abs().max() / scale)
    tolerance = GATED_TOLERANCE if any(".linear_attn." in name for name in got) else GRADIENT_TOLERANCE
    return {name: error for name, error in errors.items() if not error < tolerance}


def read_all(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def row_here(config: Any, reference: dict[str, Tensor]) -> Any:
    size, rank = config.context_parallel_size, parallel_state.get_context_parallel_rank()
    parts = sequences(reference["logits"].shape[1])
    return row_of(parts, rank, size, config.tensor_model_parallel_size)


def row_of(parts: list[Tensor], rank: int, size: int, multiple: int) -> Any:
    batch = PackedBatch.__new__(PackedBatch)
    fields = {
        "tokens": torch.cat(parts)[None],
        "position_ids": torch.cat([torch.arange(len(part)) for part in parts])[None],
        "rows": torch.arange(sum(map(len, parts))),
        "runs": Runs.apart([len(part) for part in parts], "cpu"),
    }
    for name, value in fields.items():
        object.__setattr__(batch, name, value)
    return cut(batch, rank, size, multiple, torch.device("cpu"))


def held_here(config: Any) -> list[int]:
    """Tokens that this rank of context parallelism holds, in its order."""
    size, rank = config.context_parallel_size, parallel_state.get_context_parallel_rank()
    held, start = [], 0
    for length in LENGTHS:
        chunk = length // (2 * size)
        numbers = (rank, 2 * size - 1 - rank) if size > 1 else (0, 1)
        held += [start + number * chunk + i for number in numbers for i in range(chunk)]
        start += length
    return held


def run(chunks: list[Any], row: Any, config: Any, *, ahead: float = 0.0) -> Tensor | None:
    """[T, V / tensor parallel size] on the last stage: the chunks of all stages one after the other."""
    stages, stage = config.pipeline_model_parallel_size, parallel_state.get_pipeline_model_parallel_rank()
    tokens = row.tokens.shape[1]
    held = tokens // (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    output = None
    for number, chunk in enumerate(chunks):
        if stage or number:
            arriving = torch.empty(held, 1, config.hidden_size, dtype=config.params_dtype)
            dist.recv(arriving, (stage - 1) % stages)
            chunk.set_input_tensor(arriving)
        model = unwrapped(chunk)
        scoring = Scoring(model.vocab_size, 1.0, -1)
        model.head = Head(torch.arange(tokens), row.labels, ahead * row.has_label, scoring)
        output = chunk(row.tokens, row.positions, None, packed_seq_params=row.packing)
        if not (stage == stages - 1 and number == len(chunks) - 1):
            dist.send(output.contiguous(), (stage + 1) % stages)
            output = None
    return None if output is None else output[0]


def gathered(mine: list[Any]) -> dict[str, Tensor] | None:
    """Whole tensors in float32 from the parts of all ranks, on rank 0. Raises where an element is not given once."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    if dist.get_rank():
        return None
    whole: dict[str, Tensor] = {}
    times: dict[str, Tensor] = {}
    for name, shape, index, part in (entry for of_rank in parts for entry in of_rank):
        whole.setdefault(name, torch.zeros(shape))[index] = part.float()
        times.setdefault(name, torch.zeros(shape))[index] += 1
    for name, count in times.items():
        if not (count == 1).all():
            raise AssertionError(f"{name}: elements given {count.min()} to {count.max()} times")
    return whole


def export_errors(chunks: list[Any], args: dict[str, Any], config: Any, source: Path) -> list[str]:
    """Tensors that all ranks together give otherwise than `source` has them; empty on ranks but the first."""
    mine = [(name, shape, index, part.clone()) for name, shape, index, part in export_slices(chunks, args, config)]
    whole = gathered(mine)
    if whole is None:
        return []
    wanted = read_all(source)
    for pattern in find_family(config).ignored(config):
        wanted = {name: tensor for name, tensor in wanted.items() if not re.fullmatch(pattern, name)}
    errors = [f"{name}: on one side only" for name in wanted.keys() ^ whole.keys()]
    errors += [f"{name}: hf_shapes differ" for name in wanted.keys() ^ hf_shapes(args, config).keys()]
    errors += [
        f"{name}: not the same" for name in wanted.keys() & whole if not torch.equal(whole[name], wanted[name].float())
    ]
    # A router's bias is in float32 whatever the weights are.
    errors += [
        f"{n}: {t.dtype}" for n, _, _, t in mine if n in wanted and t.dtype != wanted[n].dtype and "bias" not in n
    ]
    return errors


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, world_size, directory, layouts = sys.argv[1:]
    ranks = Ranks(int(rank), int(world_size), f"file://{directory}/rendezvous-{world_size}", 2)
    for layout in layouts.split(","):
        # For all families: experts only change the number of groups.
        parallel.initialize(LAYOUTS[layout] | {"num_experts": 4, "num_layers": LAYERS}, ranks)
        results = {}
        for family in sorted(path for path in Path(directory).iterdir() if path.is_dir()):
            try:
                results[family.name] = check(family, layout)
            except Exception:
                results[family.name] = {"error": traceback.format_exc()}
                if int(world_size) > 1:
                    # The other rank waits in a collective call that this one will not make.
                    raise
        Path(directory, f"{layout}-{rank}.json").write_text(json.dumps(results))
    parallel.destroy()
    ranks.close()
