"""Names that `slime train` knows: what is not there yet is refused by name and with its reason, never ignored.

`python -m slime.launcher.flag_table > docs/flags.md` writes the page of all flags.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from slime.converters.megatron_flags import Row, committed, why_refused
from slime.launcher.declared import Flag, declared, type_name
from slime.rollout.engines.sglang.reserved import RESERVED
from slime.types.settings import flag_names

# Reason -> names. A name that a package declares as a setting is available, whatever stands here.
PLANNED: dict[str, str] = {
    "running one half of the system alone": "debug-rollout-only debug-train-only load-debug-rollout-data",
    "recorded runs and dumps": """load-debug-rollout-data-subsample load-forge-rollout-data save-debug-rollout-data
        save-debug-train-data dump-details""",
    "memory and time profiles": """memory-snapshot-dir memory-snapshot-num-steps memory-recorder record-memory-history
        profile-target""",
    "checks that only a test run makes": """ci-test ci-disable-kl-checker ci-train-rollout-logprob-abs-diff-threshold
        ci-save-grad-norm ci-load-grad-norm check-weight-update-equal""",
    "the loop and its placement": """train-backend actor-num-nodes actor-num-gpus-per-node rollout-num-gpus
        rollout-num-gpus-per-engine num-gpus-per-node colocate num-rollout num-epoch start-rollout-id train-env-vars
        custom-config-path seed""",
    "moving idle weights off the GPU": "offload offload-train offload-rollout release-train",
    "process groups of the trainer": "distributed-backend distributed-timeout-minutes",
    "training in the Megatron backend": """padded-vocab-size model-name ref-ckpt-step async-save no-save-optim
        custom-model-provider-path custom-megatron-init-path custom-megatron-before-log-prob-hook-path
        custom-megatron-before-train-step-hook-path""",
    "actor and critic with flags of their own": "megatron-config-path",
    "training in 8 bits": """megatron-deepgemm-forward-layers megatron-deepgemm-forward-modules
        megatron-deepgemm-moe-forward-layers megatron-deepgemm-moe-forward-modules""",
    "attention that no family of models here has": "qwen-gdn-backend allgather-cp",
    "padding and optimizer variants": "data-pad-size-multiplier use-stateless-adam",
    "multi-token-prediction layers": "mtp-num-layers mtp-loss-scaling-factor enable-mtp-training",
    "replaying the routing of a mixture of experts": "use-routing-replay use-rollout-routing-replay",
    "training only some of the parameters": "only-train-params-name-list freeze-params-name-list freeze-indexer",
    "weight updates other than whole weights to the engines of this run": """update-weight-mode update-weight-transport
        update-weight-disk-dir update-weight-disk-keep-files update-weight-delta-encoding update-weight-delta-checksum
        update-weight-local-checkpoint-dir custom-update-weight-post-write-path update-weight-buffer-size""",
    "training while the next rollout runs": "update-weights-interval keep-old-actor async-buffer-size",
    "how rollout data travels: here always by gRPC from the buffer": "rollout-data-transport",
    "checkpoints": "load save save-interval save-hf ref-load reset-optimizer-states",
    "generation": """hf-checkpoint rollout-function-path rollout-temperature rollout-top-p rollout-top-k
        rollout-max-context-len rollout-max-prompt-len rollout-max-response-len rollout-skip-special-tokens rollout-stop
        rollout-stop-token-ids rollout-shuffle rollout-seed over-sampling-batch-size dynamic-sampling-filter-path
        custom-generate-function-path rollout-sample-hook-path max-turns""",
    "samples that span weight versions": "partial-rollout mask-offpolicy-in-partial-rollout",
    "engines and routers that someone else started": """rollout-external-engine-addrs sglang-router-ip
        sglang-router-port use-distributed-post http-proxy""",
    "SGLang engines": "sglang-router-request-timeout-secs sglang-server-concurrency",
    "engines that are not all alike": "prefill-num-servers sglang-config",
    "watching engines and restarting them": """use-fault-tolerance rollout-health-check-interval
        rollout-health-check-timeout rollout-health-check-first-wait""",
    "prompts": """disable-rollout-global-dataset data-source-path prompt-data apply-chat-template
        apply-chat-template-kwargs input-key label-key multimodal-keys metadata-key tool-key rollout-batch-size
        n-samples-per-prompt buffer-filter-path""",
    "the separate rollout-buffer service": """rollout-buffer-url fetch-trajectory-retry-times
        min-batch-collection-ratio rollout-task-type""",
    "batches": """global-batch-size num-steps-per-rollout micro-batch-size balance-data balance-by-flops
        use-dynamic-batch-size max-tokens-per-gpu log-probs-max-tokens-per-gpu log-probs-chunk-size
        recompute-loss-function""",
    "evaluation": """eval-function-path eval-interval eval-prompt-data eval-config skip-eval-before-train eval-input-key
        eval-label-key eval-tool-key n-samples-per-eval-prompt eval-temperature eval-top-p eval-top-k
        eval-max-response-len eval-max-prompt-len eval-min-new-tokens eval-max-context-len eval-reward-key""",
    "the critic and advantages learned from it": "num-critic-only-steps value-clip gamma lambd",
    "algorithms": """lr clip-grad calculate-per-token-loss eps-clip eps-clip-high eps-clip-c kl-coef loss-type
        kl-loss-type advantage-estimator use-kl-loss kl-loss-coef use-unbiased-kl ref-update-interval entropy-coef
        normalize-advantages disable-grpo-std-normalization disable-rewards-normalization
        disable-compute-advantages-and-returns use-rollout-entropy loss-mask-type""",
    "correcting for what engine and trainer compute differently": """get-mismatch-metrics use-rollout-logprobs use-tis
        tis-clip tis-clip-low custom-tis-function-path use-opsm opsm-delta true-on-policy-mode""",
    "plug-ins of the trainer": """custom-loss-function-path custom-advantage-function-path
        custom-pg-loss-reducer-function-path rollout-data-postprocess-path
        custom-convert-samples-to-train-data-path""",
    "on-policy distillation": "use-opd opd-type opd-kl-coef opd-teacher-load opd-teacher-ckpt-step",
    "rewards": "rm-type reward-key group-rm rm-url custom-rm-path custom-reward-post-process-path",
    "hooks that see all groups of a rollout": """rollout-sample-filter-path rollout-all-samples-process-path
        custom-rollout-log-function-path custom-eval-rollout-log-function-path""",
    "logging to Weights & Biases": """use-wandb wandb-mode wandb-dir wandb-key wandb-host wandb-team wandb-group
        wandb-project wandb-run-id disable-wandb-random-suffix wandb-always-use-train-step""",
    "TensorBoard": "use-tensorboard tb-project-name tb-experiment-name",
    "more metrics of a rollout": "log-multi-turn log-passrate log-reward-category log-correct-samples",
}

# Older names of flags -> the ones they have here.
RENAMED = {"tis-threshold": "tis-clip"}

ROUTER = "a setting of SGLang's router; this version sends to its own engines directly"

KNOWN: dict[str, str] = {name: reason for reason, names in PLANNED.items() for name in names.split()}


def why_not(name: str) -> str | None:
    """The reason why a known flag (`name` without dashes in front) is not available; None for an unknown one.

    Holds only for flags that no package declares.
    """
    if name in KNOWN:
        return KNOWN[name]
    if name.startswith("router-"):
        return ROUTER
    return why_refused(f"--{name}")


def page() -> str:
    """docs/flags.md."""
    flags = declared()
    lines = [
        "# Flags of `slime train`",
        "",
        "Written by `python -m slime.launcher.flag_table > docs/flags.md`; do not edit by hand. Every flag is also a",
        "key of a `--config FILE.yaml`, with underscores. A flag wins over that file.",
    ]
    titles = {"shared": "Shared by several packages"}
    groups: dict[str, list[Flag]] = {}
    for flag in flags.values():
        if not flag.field.metadata["flag"]:
            continue
        groups.setdefault("shared" if len(flag.packages) > 1 else flag.packages[0], []).append(flag)
    for group in ("shared", "launcher", "buffer", "rollout", "trainer"):
        lines += ["", f"## {titles.get(group, f'`slime-{group}`')}", ""]
        lines += ["| flag | package | type | default | range | status | meaning |", "|---|---|---|---|---|---|---|"]
        for flag in sorted(groups.get(group, ()), key=lambda f: f.name):
            cells = (
                f"`{flag.spelling}`", ", ".join(flag.packages), type_name(flag.hint), _shown(flag.default),
                _range(flag.field.metadata), "available", flag.field.metadata["help"],
            )  # fmt: skip
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    available = available_names(flags)
    lines += _sglang(available) + _megatron()
    lines += [
        "",
        "## Known, not available yet",
        "",
        "Giving one of these is an error that says so. So is any other `--router-*`.",
        "",
        "| reason | flags |",
        "|---|---|",
    ]
    for reason, names in PLANNED.items():
        missing = [f"`--{name}`" for name in sorted(names.split()) if name not in available]
        if missing:
            lines.append(f"| {reason} | {' '.join(missing)} |")
    return "\n".join(lines) + "\n"


def _sglang(taken: set[str]) -> list[str]:
    """The section of SGLang's flags: those that cannot be given, but names that are flags of ours (`taken`)."""
    lines = [
        "", "## SGLang", "",
        "`--sglang-NAME [VALUE]` gives `--NAME [VALUE]` to every engine, for any flag of the installed SGLang:",
        "`--sglang-mem-fraction-static 0.7 --sglang-disable-cuda-graph`. An unknown one is an error with the nearest",
        "name; `python -m sglang.launch_server --help` lists them. These are set here and refused:", "",
        "| instead of it | flags |", "|---|---|",
    ]  # fmt: skip
    refused: dict[str, list[str]] = {}
    for name, instead in RESERVED.items():
        if f"sglang-{name}" in taken or f"sglang-{name}" in KNOWN:
            continue
        refused.setdefault(instead, []).append(name)
    return lines + [
        f"| {instead} | {' '.join(f'`--sglang-{name}`' for name in sorted(names))} |"
        for instead, names in refused.items()
    ]


def _megatron() -> list[str]:
    """The section of Megatron's flags, as those of Megatron-LM v0.16."""
    rows = [row for row in committed() if row.taken]
    lines = [
        "", "## Megatron", "",
        "Megatron's own flags, under their own names, for `--train-backend megatron`; `slime train --help-megatron`",
        "prints them. Where Megatron-LM is on the path, names and defaults are those of its parser. What describes the",
        "model comes from `--hf-checkpoint`, and a flag that says something else is an error.", "",
        "| flag | type | default | sets | meaning |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for row in sorted(rows, key=lambda row: row.flag):
        names = ", ".join(f"`{flag}`" for flag in row.flags)
        default = "" if row.default is None or row.kind in ("on", "off") else f"`{row.default}`"
        cells = (names, _megatron_type(row), default, ", ".join(row.sets), _megatron_meaning(row))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "Refused:", "", "| reason | flags |", "|---|---|"]
    refused: dict[str, list[str]] = {}
    for row in committed():
        if row.status == "refused":
            refused.setdefault(row.note, []).extend(row.flags)
    lines += [f"| {why} | {' '.join(f'`{name}`' for name in sorted(names))} |" for why, names in refused.items()]
    return lines


def _megatron_type(row: Row) -> str:
    if row.choices:
        return ", ".join(row.choices)
    return {"on": "switch", "off": "switch"}.get(row.kind, row.kind.replace("*", " ..."))


def _megatron_meaning(row: Row) -> str:
    if row.status == "same":
        only = "" if row.kind in ("on", "off") else f"only {' '.join(map(str, row.accepts))}: "
        return f"{row.help} ({only}{row.note})"
    return f"{row.help} ({row.note})" if row.note else row.help


def available_names(flags: dict[str, Flag]) -> set[str]:
    """Flag names without dashes in front: fields, aliases and the names that turn something off."""
    names: set[str] = set()
    for flag in flags.values():
        if not flag.field.metadata["flag"]:
            continue
        names.update(name[2:] for name in flag_names(flag.field))
        if flag.default is None and type_name(flag.hint) == "bool" and flag.field.metadata["switch"] is None:
            names.add("no-" + flag.name.replace("_", "-"))
    return names


def _shown(default: Any) -> str:
    if default is dataclasses.MISSING:
        return "required"
    if isinstance(default, bool):
        return "off"  # the flag of what is on by default is the one that turns it off
    return "" if default is None else f"`{default}`"


def _range(meta: Any) -> str:
    if meta["choices"]:
        return ", ".join(f"`{choice}`" for choice in meta["choices"])
    bounds = (("≥", "minimum"), (">", "above"), ("≤", "maximum"))
    return ", ".join(f"{sign} {meta[name]}" for sign, name in bounds if meta[name] is not None)


if __name__ == "__main__":
    print(page(), end="")
