"""Every flag of the system that this one stands in for: a right value is taken or refused by name, a wrong one refused.

known_flags.tsv has a line a flag: a right value, the flags that it needs beside it, and wrong values (` | ` between
them; `=TEXT` is joined to a flag that takes no value, `alone` leaves out what is needed beside it).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from slime.converters.megatron.model_scripts import model_config
from slime.launcher.config import run_config
from slime.launcher.config.catalogue import declared
from slime.launcher.config.known_flags import KNOWN, available_names, page
from slime.launcher.run_directory.checkpoints import STATE_FILE
from slime.rollout.recordings.rollouts import write_rollout
from slime.types.errors import ConfigError, NotAvailable

# Every flag of these groups is there, but for what the models and the wire of this system do not have.
WHOLE = frozenset(
    """debug-rollout-only debug-train-only load-debug-rollout-data custom-config-path padded-vocab-size actor-num-nodes
    actor-num-gpus-per-node rollout-num-gpus rollout-num-gpus-per-engine num-gpus-per-node colocate offload
    offload-train offload-rollout distributed-backend distributed-timeout-minutes
    hf-checkpoint model-name rollout-function-path rollout-temperature rollout-top-p rollout-top-k
    rollout-max-context-len rollout-max-prompt-len rollout-max-response-len rollout-skip-special-tokens rollout-stop
    rollout-stop-token-ids rollout-shuffle rollout-seed over-sampling-batch-size dynamic-sampling-filter-path
    partial-rollout mask-offpolicy-in-partial-rollout custom-generate-function-path rollout-sample-hook-path
    custom-rollout-log-function-path custom-eval-rollout-log-function-path buffer-filter-path update-weight-buffer-size
    update-weights-interval keep-old-actor rollout-data-postprocess-path rollout-data-transport
    sglang-config prefill-num-servers use-slime-router
    rollout-external-engine-addrs num-rollout num-epoch disable-rollout-global-dataset data-source-path prompt-data
    apply-chat-template apply-chat-template-kwargs input-key label-key metadata-key multimodal-keys tool-key
    start-rollout-id rollout-batch-size n-samples-per-prompt global-batch-size num-steps-per-rollout micro-batch-size
    balance-data balance-by-flops use-dynamic-batch-size max-tokens-per-gpu log-probs-max-tokens-per-gpu
    eval-function-path
    eval-interval eval-prompt-data eval-config skip-eval-before-train eval-input-key eval-label-key eval-tool-key
    n-samples-per-eval-prompt eval-temperature eval-top-p eval-top-k eval-max-response-len eval-max-prompt-len
    eval-min-new-tokens eval-max-context-len save-debug-rollout-data load-forge-rollout-data
    load-debug-rollout-data-subsample save-debug-train-data dump-details memory-snapshot-dir memory-snapshot-num-steps
    profile-target memory-recorder record-memory-history check-weight-update-equal""".split()
)


class Line(NamedTuple):
    name: str
    right: str
    beside: str
    wrong: str


LINES = [
    Line(*line.split("\t"))
    for line in Path(__file__).with_name("known_flags.tsv").read_text(encoding="utf-8").splitlines()[1:]
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("flags")
    model, checkpoint = root / "model", root / "checkpoints" / "step_000003"
    for directory in (checkpoint, root / "empty"):
        directory.mkdir(parents=True)
    for directory, name in ((model, "qwen3-4B"), (root / "mtp", "mimo-7B-rl"), (root / "gated", "qwen3.5-9B")):
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(model_config(name)))
        (directory / "tokenizer.json").write_text("{}")
    (root / "experts").mkdir()
    experts = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2}
    (root / "experts" / "config.json").write_text(json.dumps(model_config("qwen3-4B") | experts))
    (root / "experts" / "tokenizer.json").write_text("{}")
    (root / "vision").mkdir()
    (root / "vision" / "config.json").write_text('{"model_type": "llava", "vision_config": {}}')
    for name in ("tokenizer.json", "processor_config.json"):
        (root / "vision" / name).write_text("{}")
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / STATE_FILE).write_text("{}")
    (root / "prompts.jsonl").write_text('{"input": "1 + 1"}\n')
    (root / "settings.yaml").write_text("rollout_batch_size: 16\n")
    (root / "eval.yaml").write_text(f"eval: {{datasets: [{{name: sums, path: {root}/prompts.jsonl}}]}}\n")
    (root / "models.yaml").write_text("sglang: [{name: policy, server_groups: [{num_engines: 1}]}]\n")
    (root / "plugins.py").write_text("def anything(*args, **kwargs):\n    return None\n")
    write_rollout(root / "recording", 0, [])
    return {
        "model": model,
        "mtp": root / "mtp",
        "gated": root / "gated",
        "experts": root / "experts",
        "vision": root / "vision",
        "checkpoint": checkpoint.parent,
        "dir": root / "empty",
        "file": root / "prompts.jsonl",
        "prompts": root / "prompts.jsonl",
        "yaml": root / "settings.yaml",
        "models": root / "models.yaml",
        "evalconfig": root / "eval.yaml",
        "plugins": root / "plugins.py",
        "plugin": Path(f"{root}/plugins.py:anything"),
        "recording": root / "recording",
    }


def command(line: Line, value: str, places: dict[str, Path], *, beside: bool = True) -> list[str]:
    """A command line on which the flag has `value`, and nothing else is wrong."""
    flag = f"--{line.name}"
    words = [flag + value] if value.startswith("=") else [flag, *split(value, places)]
    base = {"hf-checkpoint": "{model}", "prompt-data": "{prompts}", "num-rollout": "4", "n-samples-per-prompt": "2"}
    if line.name == "num-epoch":  # the other way to say how long
        del base["num-rollout"]
    given = [word for name, text in base.items() if name != line.name for word in (f"--{name}", *split(text, places))]
    return [*given, *(split(line.beside, places) if beside else []), *words]


def split(text: str, places: dict[str, Path]) -> list[str]:
    # Quotes belong to the JSON of a value.
    return [word.format(**{name: str(path) for name, path in places.items()}) for word in text.split()]


def parse(words: list[str]) -> run_config.RunConfig:
    return run_config.parse(words, environment={})


def wrong_words(line: Line, places: dict[str, Path]) -> list[list[str]]:
    """Command lines that are wrong by this flag; without its argument is one of them."""
    values = [value for value in line.wrong.split(" | ") if value]
    made = [
        command(line, line.right, places, beside=False) if value == "alone" else command(line, value, places)
        for value in values
    ]
    return [*made, command(line, "", places)] if line.right else made


def test_the_table_is_whole() -> None:
    names = [line.name for line in LINES]
    assert len(names) == len(set(names)) > 220
    assert WHOLE <= set(names)
    listed = page()
    # Two families of flags are listed as patterns: --sglang-NAME, --router-*.
    assert [n for n in names if f"`--{n}`" not in listed] == ["router-policy", "sglang-mem-fraction-static"]
    assert set(KNOWN) <= set(names), "every name that is refused with a reason is tried here"
    assert available_names(declared()).isdisjoint(KNOWN), "a flag that is there needs no reason"


@pytest.mark.parametrize("line", LINES, ids=[line.name for line in LINES])
def test_a_right_value_is_taken_or_refused_with_a_reason(line: Line, places: dict[str, Path]) -> None:
    try:
        parse(command(line, line.right, places))
    except NotAvailable as error:
        assert line.name not in WHOLE, str(error)
        reason = re.split("is not (?:available|supported) yet", str(error))[-1].strip(" :;")
        assert len(reason) > 10, f"{line.name} has no reason: {error}"


@pytest.mark.parametrize("line", LINES, ids=[line.name for line in LINES])
def test_a_wrong_value_is_an_error_with_the_flags_name(line: Line, places: dict[str, Path]) -> None:
    for words in wrong_words(line, places):
        with pytest.raises(ConfigError) as caught:
            parse(words)
        assert f"--{line.name}" in str(caught.value), words
