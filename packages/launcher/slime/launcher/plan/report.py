"""Writes the report of `slime train --dry-run`: placement, batches and estimated memory of a run; starts nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from slime.converters.megatron.flags import given
from slime.launcher.config.catalogue import as_typed
from slime.launcher.config.checks.loop import staleness_bound
from slime.launcher.config.presets import PRESETS
from slime.launcher.config.run_config import RunConfig
from slime.launcher.plan.parameter_counts import adapters_in_words
from slime.launcher.plan.run_plan import Hardware, Plan, make_plan
from slime.launcher.plan.trainer_memory import GIB, byte_size, checkpoint_bytes, peak
from slime.launcher.run_directory.earlier_run import begins_anew
from slime.types.errors import counted


def dry_run(config: RunConfig, *, asynchronous: bool = False) -> tuple[str, bool]:
    """Returns (the report as text, whether the run fits into its GPUs' and the machine's memory, as far as is known).

    Raises the errors that the run would raise before it starts anything, and InvalidFile.
    """
    plan = make_plan(config, hardware_of(config), asynchronous=asynchronous)
    sections = (_model, *((_preset,) if config.launcher.preset else ()), _placement, _batches, _memory)
    text = "\n\n".join("\n".join(section(plan)) for section in sections) + "\n"
    host = plan.hardware.host_bytes
    in_host = host is None or plan.host_memory()[0] <= host
    return text, in_host and all(needed <= size for needed, size in plan.phases().values())


def hardware_of(config: RunConfig) -> Hardware:
    """Returns the GPUs that the flags set, or else those of this machine."""
    from slime.launcher.platform.probes import gpus, memory_size

    settings = config.launcher
    set_size = settings.dry_run_gpu_gib * GIB if settings.dry_run_gpu_gib else None
    found = [] if settings.dry_run_gpus is not None else gpus()
    if found:
        words = f"{counted(len(found), 'GPU')} of this machine"
        size = set_size or min(gpu.total_bytes for gpu in found)
        return Hardware(tuple(gpu.name for gpu in found), size if size > 0 else None, words, host_bytes=memory_size())
    if settings.dry_run_gpus is not None:
        count = settings.dry_run_gpus
        return Hardware(
            tuple(map(str, range(count))), set_size, f"{counted(count, 'GPU')}, by --dry-run-gpus", assumed=True
        )
    words = "no GPU on this machine: processes on the CPU (--dry-run-gpus N plans for N GPUs)"
    return Hardware((), None, words, host_bytes=memory_size())


def _model(plan: Plan) -> Iterator[str]:
    trainer = plan.config.trainer
    kind = plan.model_config.get("model_type", "?")
    size = f", {byte_size(plan.hardware.gpu_bytes)} each" if plan.hardware.gpu_bytes else ""
    yield f"Model       {trainer.hf_checkpoint} ({kind}): {plan.parameters:,} parameters"
    quantized = given(plan.config.megatron)
    fp8 = f", products in FP8 ({quantized['fp8']}, {quantized['fp8_recipe']})" if quantized.get("fp8") else ""
    yield f"Trainer     {trainer.train_backend}, {'bfloat16' if trainer.bf16 else 'float32'}{fp8}"
    if (sentence := begins_anew(plan.config)) is not None:
        yield f"Weights     {sentence}"
    if plan.adapters is not None:
        yield f"LoRA        {adapters_in_words(trainer, plan.model_config, plan.adapters, plan.parameters)}"
    yield f"Machine     {plan.hardware.words}{size}"


def _preset(plan: Plan) -> Iterator[str]:
    preset = str(plan.config.launcher.preset)
    yield f"Preset      {preset}"
    for name, value in PRESETS[preset].items():
        used = plan.config.flat[name]
        yield f"  {as_typed(name, used)}" + ("" if used == value else f"   (the preset has {value})")


def _placement(plan: Plan) -> Iterator[str]:
    yield "Placement"
    placement, engines = plan.placement, plan.engines_of_gpus()
    if not placement.trainer_ranks:
        yield "  --debug-rollout-only: no trainer"
    for rank in range(placement.trainer_ranks):
        node, number = plan.gpu_of_rank(rank)
        shared = f", {engines[node, number]}" if placement.shares_gpus and (node, number) in engines else ""
        yield f"  {_where(plan, node, number)}: trainer rank {rank}{_coordinates(plan, rank)}{shared}"
    if placement.shares_gpus:
        turns = "release their memory while the trainer works" if placement.offloads else "keep their memory"
        yield f"  colocated: the engines {turns}"
    elif plan.config.launcher.debug_train_only:
        yield "  --debug-train-only: no engine"
    elif plan.engine is None:
        for address in plan.config.rollout.rollout_external_engine_addrs or ():
            yield f"  {address}: engine that is already running"
    elif not engines and (models := plan.models_of_engines()):
        for name, number in Counter(models).items():
            words = f"{counted(number, f'{plan.engine_name} engine')} of {name}"
            yield f"  {_where(plan, placement.engines[0].node, None)}: {words}"
    elif not engines:
        for share in placement.engines:
            yield f"  {_where(plan, share.node, None)}: {counted(plan.engines_of(share), f'{plan.engine_name} engine')}"
    else:
        for (node, number), name in engines.items():
            yield f"  {_where(plan, node, number)}: {name}"


def _where(plan: Plan, node: int, number: int | None) -> str:
    """Spells the location of a process. number: of the GPU on the node; None for the CPU."""
    placement = plan.placement
    nodes = {*placement.trainer_nodes, *(share.node for share in placement.engines)}
    several = f"node {node} " if len(nodes) > 1 else ""
    return several + (f"GPU {plan.hardware.gpus[number]}" if placement.has_gpus and number is not None else "CPU")


def _coordinates(plan: Plan, rank: int) -> str:
    sizes = plan.sizes
    if plan.args is None:
        return f" (dp {rank})" if sizes.data > 1 else ""
    place = sizes.coordinates(rank)
    words = [
        f"{name} {at}"
        for name, at, size in (
            ("tp", place.tensor, sizes.tensor),
            ("pp", place.pipeline, sizes.pipeline),
            ("cp", place.context, sizes.context),
            ("dp", place.data, sizes.data),
            ("ep", place.expert, sizes.expert),
            ("etp", place.expert_tensor, sizes.expert_tensor if sizes.expert > 1 else 1),
        )
        if size > 1
    ]
    return f" ({', '.join(words)})" if words else ""


def _batches(plan: Plan) -> Iterator[str]:
    trainer, sums = plan.config.trainer, plan.batches
    yield "Batches"
    yield (
        f"  --rollout-batch-size {sums.prompts} x --n-samples-per-prompt {sums.samples_per_prompt} = "
        f"{counted(sums.samples, 'sample')} per iteration"
    )
    rest = f", {counted(sums.left_over, 'sample')} left over" if sums.left_over else ""
    yield f"  {sums.samples} / {sums.per_update} samples per update = {counted(sums.updates, 'optimizer update')}{rest}"
    least, most = sums.per_update // sums.replicas, -(-sums.per_update // sums.replicas)
    share = counted(most, "sample") if least == most else f"{least} or {counted(most, 'sample')}"
    yield f"  {sums.per_update} / {counted(sums.replicas, 'data-parallel replica')} = {share} per replica and update"
    # Virtual pipeline stages take turns with as many micro-batches as there are stages.
    multiple = plan.sizes.pipeline if plan.sizes.virtual > 1 else 1
    rounded = f", rounded up to a multiple of the {multiple} pipeline stages," if multiple > 1 else ""
    if trainer.use_dynamic_batch_size:
        passes = sums.passes(max(1, plan.tokens // plan.longest), multiple)
        yield (
            f"  {plan.tokens:,} tokens per forward pass ({plan.tokens_because}): "
            f"at most {passes} passes{rounded} with samples of {plan.longest:,} tokens"
        )
    else:
        size = trainer.micro_batch_size
        number = counted(sums.passes(size, multiple), "forward pass")
        yield f"  {most} / --micro-batch-size {size}{rounded} = {number} per replica and update"
    yield f"  the longest sample has {plan.longest:,} tokens: {plan.longest_because}"
    yield _length(plan)
    yield _lag(plan)


def _length(plan: Plan) -> str:
    settings, sums = plan.config.launcher, plan.batches
    if settings.num_rollout is None:
        return f"  --num-epoch {settings.num_epoch}: as many whole iterations as the data fills, that many times"
    rollouts, updates = settings.num_rollout, settings.num_rollout * sums.updates
    return (
        f"  {counted(rollouts, 'iteration')} x {counted(sums.updates, 'update')} = {counted(updates, 'update')}, "
        f"{rollouts * sums.samples:,} samples"
    )


def _lag(plan: Plan) -> str:
    settings = plan.config.launcher
    if settings.fully_async:
        bound = counted(staleness_bound(plan.config.flat), "weight update")
        return f"  fully asynchronous: samples are up to {bound} old (--max-staleness)"
    interval, prefetched = settings.update_weights_interval, settings.async_buffer_size or 1
    staleness = interval - 1 + (prefetched if plan.asynchronous else 0)
    if not staleness:
        return "  synchronous: every sample is generated with the weights that it trains"
    kind = f"asynchronous, up to {counted(prefetched, 'rollout')} ahead" if plan.asynchronous else "synchronous"
    every = "every rollout" if interval == 1 else f"every {interval} rollouts"
    return f"  {kind}: engines get new weights after {every}, so samples are up to {counted(staleness, 'rollout')} old"


def _memory(plan: Plan) -> Iterator[str]:
    yield from _trainer_memory(plan)
    for name, _, memory in plan.engine_memories():
        yield f"Memory of an engine ({name})"
        yield from (f"  {line}" for line in memory.lines)
    disk, formula = checkpoint_bytes(plan.config.trainer, plan.parameters, plan.adapters)
    yield f"A checkpoint takes {byte_size(disk)} of disk ({formula})"
    total, words = plan.host_memory()
    host = plan.hardware.host_bytes
    verdict = "" if host is None else f" of {byte_size(host)}: {'fits' if total <= host else 'DOES NOT FIT'}"
    yield f"Host memory: {byte_size(total)}{verdict}, with 1 GiB per process ({words})"
    if plan.placement.has_gpus and plan.hardware.gpu_bytes is None:
        yield "Whether it fits is unknown: --dry-run-gpu-gib GIB sets the memory of a GPU"
    for phase, (needed, size) in plan.phases().items():
        yield f"{phase}: {byte_size(needed)} of {byte_size(size)}: {'fits' if needed <= size else 'DOES NOT FIT'}"


def _trainer_memory(plan: Plan) -> Iterator[str]:
    memories = plan.memories()
    if not memories:
        return
    largest = peak(memories)
    title = f", pipeline stage {largest} of {len(memories)}, the largest" if len(memories) > 1 else ""
    yield f"Memory of a trainer's {'GPU' if plan.placement.has_gpus else 'process'}{title}"
    width = max(len(item.name) for item in memories[largest].items)
    for item in memories[largest].items:
        where = " (machine's memory)" if item.host else "" if item.lasting else " (estimate)"
        yield f"  {item.name:{width}}  {byte_size(item.num_bytes):>12}  {item.formula}{where}"
    for stage, memory in enumerate(memories):
        name = f"stage {stage}: " if len(memories) > 1 else ""
        yield (
            f"  {name}{plan.held[stage].total:,} parameters: {byte_size(memory.lasting)} always, "
            f"{byte_size(memory.training)} while training"
        )
