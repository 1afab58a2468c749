"""Known flags of `slime train` that are not supported: each is refused with the reason, never ignored.

`python -m slime.launcher.config.known_flags > docs/flags.md` writes the page of all flags.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from slime.converters.megatron.flags import FlagRow, committed, why_refused
from slime.launcher.config.catalogue import Flag, declared, type_name
from slime.rollout.engines.sglang.reserved import RESERVED
from slime.types.settings import default_text, flag_help, flag_names

# Names by the reason why they are refused. A setting that a package declares is available even if it is listed here.
PLANNED: dict[str, str] = {
    "checks for the test runs of the original system": """ci-test ci-disable-kl-checker
        ci-train-rollout-logprob-abs-diff-threshold ci-save-grad-norm ci-load-grad-norm""",
    "the trainer's processes live as long as the run; --offload-train frees their GPU memory": "release-train",
    "the critic's settings are flags of their own: --critic-lr, --critic-load and others": "megatron-config-path",
    "the trainer does not multiply in 8 bits": """megatron-deepgemm-forward-layers megatron-deepgemm-forward-modules
        megatron-deepgemm-moe-forward-layers megatron-deepgemm-moe-forward-modules""",
    "the gated delta rule has one implementation here, in PyTorch": "qwen-gdn-backend",
    "log-probs are computed in two passes, which would drop different numbers; LoRA is trained without": "lora-dropout",
    "the optimizer is AdamW with its moments": "use-stateless-adam",
    "the trainer has one attention, for packed rows": "attn-implementation",
    "requests go through the rollout service's own router, without another router or proxy between": """
        sglang-router-ip sglang-router-port use-distributed-post http-proxy""",
    "the rollout service's own router has no middleware, and takes its limits from the engines' settings": """
        slime-router-middleware-paths slime-router-timeout slime-router-max-connections
        slime-router-health-check-failure-threshold""",
    "groups are kept in this system's buffer, which clients reach by gRPC": """rollout-buffer-url
        fetch-trajectory-retry-times min-batch-collection-ratio rollout-task-type""",
    "a secret: set WANDB_API_KEY; on a command line the key is accepted with a warning": "wandb-key",
}

ROUTER = "a setting of SGLang's router; requests go through the rollout service's own"

KNOWN: dict[str, str] = {name: reason for reason, names in PLANNED.items() for name in names.split()}


# Flags of other tools, and ours with the same meaning; the flag with the nearest spelling would mean something else.
ELSEWHERE: dict[str, str] = {
    "model": "--hf-checkpoint DIR",
    "model-name-or-path": "--hf-checkpoint DIR",
    "model-path": "--hf-checkpoint DIR",
    "dataset": "--prompt-data FILE",
    "dataset-name": "--prompt-data FILE",
    "data": "--prompt-data FILE",
    "train-files": "--prompt-data FILE",
    "report-to": "--use-wandb or --use-trackio or --use-mlflow or --use-swanlab",
    "num-gpus": "--actor-num-gpus-per-node N and --rollout-num-gpus N",
    "n-gpus": "--actor-num-gpus-per-node N and --rollout-num-gpus N",
    "num-nodes": "--actor-num-nodes N",
    "batch-size": "--rollout-batch-size N (prompts) and --global-batch-size N (samples)",
    "train-batch-size": "--rollout-batch-size N (prompts) and --global-batch-size N (samples)",
    "per-device-train-batch-size": "--micro-batch-size N",
    "num-generations": "--n-samples-per-prompt N",
    "group-size": "--n-samples-per-prompt N",
    "epochs": "--num-epoch N",
    "num-epochs": "--num-epoch N",
    "num-train-epochs": "--num-epoch N",
    "max-steps": "--num-rollout N",
    "total-steps": "--num-rollout N",
    "learning-rate": "--lr X",
    "beta": "--kl-loss-coef X",
    "max-completion-length": "--rollout-max-response-len N",
    "max-prompt-length": "--rollout-max-prompt-len N",
    "temperature": "--rollout-temperature X",
    "top-p": "--rollout-top-p X",
    "max-tokens": "--rollout-max-response-len N",
    "max-new-tokens": "--rollout-max-response-len N",
    "tokenizer": "--hf-checkpoint DIR, which holds the tokenizer",
    "reward": "--rm-type NAME or --custom-rm-path FILE.py:FUNCTION",
    "reward-function": "--custom-rm-path FILE.py:FUNCTION",
    "reward-funcs": "--custom-rm-path FILE.py:FUNCTION",
    "algorithm": "--advantage-estimator NAME",
    "resume": "--load DIR",
    "use-lora": "--lora-rank R",
    "use-peft": "--lora-rank R",
    "lora-r": "--lora-rank R",
    "target-modules": "--lora-target-modules NAME ...",
    "standby": "--buffer-store URL and start the run again; only `slime-buffer serve` has a standby",
    "resume-from-checkpoint": "--load DIR",
}


def why_not(name: str) -> str | None:
    """Returns the reason why a known flag is not available; None for an unknown flag.

    name: the flag without its leading dashes. A flag that a package declares is available whatever this returns.
    """
    if name in KNOWN:
        return KNOWN[name]
    if name.startswith("router-"):
        return ROUTER
    return why_refused(f"--{name}")


def page() -> str:
    """Returns the text of docs/flags.md."""
    flags = declared()
    lines = [
        "# Flags of `slime train`",
        "",
        "Written by `python -m slime.launcher.config.known_flags > docs/flags.md`; do not edit by hand.",
        "",
        "A flag is `--NAME VALUE` or `--NAME=VALUE`. It is also a key of a `--config FILE.yaml`, with underscores, and",
        "an environment variable, `SLIME_NAME=VALUE` in capitals; a switch takes `true`, `false`, `1` or `0` there.",
        "Later ones win: default, file, environment, flag, `--custom-config-path FILE.yaml`. A wrong value, an unknown",
        "name and a contradiction are errors before anything starts.",
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
            names = ", ".join(f"`{name}`" for name in _spellings(flag))
            cells = (
                names, ", ".join(flag.packages), type_name(flag.hint), _shown(flag.default),
                _range(flag.field.metadata), "available", flag_help(flag.field),
            )  # fmt: skip
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    available = available_names(flags)
    lines += _sglang(available) + _megatron()
    lines += [
        "",
        "## Known, not supported yet",
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
    """Returns the section of SGLang's refused flags. taken: names that are flags of ours, which are left out."""
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
    """Returns the section of Megatron's flags, those of Megatron-LM v0.16."""
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


def _megatron_type(row: FlagRow) -> str:
    if row.choices:
        return ", ".join(row.choices)
    return {"on": "switch", "off": "switch"}.get(row.kind, row.kind.replace("*", " ..."))


def _megatron_meaning(row: FlagRow) -> str:
    if row.status == "same":
        only = "" if row.kind in ("on", "off") else f"only {' '.join(map(str, row.accepts))}: "
        return f"{row.help} ({only}{row.note})"
    return f"{row.help} ({row.note})" if row.note else row.help


def available_names(flags: dict[str, Flag]) -> set[str]:
    """Returns flag names without leading dashes: fields, aliases and the flags that turn a switch off."""
    names: set[str] = set()
    for flag in flags.values():
        if flag.field.metadata["flag"]:
            names.update(name[2:] for name in _spellings(flag))
    return names


def _spellings(flag: Flag) -> list[str]:
    return [*flag_names(flag.field), *flag.negations]


def _shown(default: Any) -> str:
    if default is dataclasses.MISSING:
        return "required"
    if isinstance(default, bool):
        return "off"  # the table shows the flag that changes the default
    return "" if default is None or default in ([], {}) else f"`{default_text(default)}`"


def _range(meta: Any) -> str:
    if meta["choices"]:
        return ", ".join(f"`{choice}`" for choice in meta["choices"])
    bounds = (("≥", "minimum"), (">", "above"), ("≤", "maximum"))
    return ", ".join(f"{sign} {meta[name]}" for sign, name in bounds if meta[name] is not None)


if __name__ == "__main__":
    print(page(), end="")
