"""What a buffer can be told, as flags and as keys of a `--config` file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.buffer.media import check_keys
from slime.types.errors import InvalidSetting
from slime.types.settings import json_object, setting

# What a set of its own may say of the columns of its file.
COLUMNS = ("input_key", "label_key", "metadata_key", "tool_key")


@dataclass(kw_only=True)
class BufferSettings:
    """Data buffer."""

    prompt_data: str | None = setting(
        None, "jsonl or parquet file of training prompts, `@[a:b]` behind it takes rows a to b", metavar="PATH"
    )
    rollout_global_dataset: bool = setting(
        True,
        "Read prompts from --prompt-data",
        off_flag="disable-rollout-global-dataset",
        off_help="Ignore --prompt-data: prompts come from clients only",
    )
    input_key: str = setting("input", "column of the prompt: text, or a list of chat messages", metavar="NAME")
    label_key: str | None = setting(None, "column of the label, any JSON value", metavar="NAME")
    metadata_key: str = setting("metadata", "column of a JSON object that travels with the sample", metavar="NAME")
    tool_key: str = setting("tools", 'column of tool definitions; they become metadata["tools"]', metavar="NAME")
    multimodal_keys: dict[str, str] = setting(
        dict,
        'JSON object, kind of media -> column: {"image": "images"}, of the `<image>` of a prompt',
        parse=json_object,
    )
    rollout_shuffle: bool = setting(False, "shuffle the prompts anew in each epoch")
    rollout_seed: int = setting(42, "seed of that shuffle: epoch e uses seed + e")
    n_samples_per_prompt: int = setting(1, "samples in a group", minimum=1)

    eval_prompt_data: list[list[str]] | None = setting(
        None, "evaluation sets: NAME PATH [NAME PATH ...], may be repeated", metavar="NAME PATH", append=True
    )
    n_samples_per_eval_prompt: int = setting(1, "samples per prompt of an evaluation set", minimum=1)
    eval_input_key: str | None = setting(None, "as --input-key for evaluation sets, where they differ", metavar="NAME")
    eval_label_key: str | None = setting(None, "as --label-key for evaluation sets, where they differ", metavar="NAME")
    eval_tool_key: str | None = setting(None, "as --tool-key for evaluation sets, where they differ", metavar="NAME")

    eval_columns: dict[str, Any] = setting(
        dict, "columns of single evaluation sets, by their names: {NAME: {label_key: answer}}", flag=False
    )

    buffer_dir: str | None = setting(
        None, "where the state lives; without it, in a temporary directory that is removed at the end", metavar="DIR"
    )
    data_place: str | None = setting(
        None,
        "Place in the data to begin at, data_place.jsonl of a checkpoint; a --buffer-dir that was used goes on where "
        "it was (default of `slime train`: that of the checkpoint in --load)",
        metavar="FILE",
    )
    buffer_durability: str = setting(
        "process",
        "what a completed group survives: the death of the process, or a power cut too (each write waits for the disk)",
        choices=("process", "power"),
    )
    buffer_filter_path: str | None = setting(
        None, "function that chooses among waiting groups: fn(args, None, groups, n) -> groups", metavar="PATH"
    )
    lease_seconds: float = setting(
        600.0, "how long a lease lasts where the worker asks for no time", above=0, maximum=604800
    )
    max_group_mb: int = setting(1024, "largest group that is accepted, all samples together, in MiB", minimum=1)
    max_prompts_mb: int = setting(256, "largest call of AddPrompts that is accepted, in MiB", minimum=1)
    allow_missing_rewards: bool = setting(
        False, "Accept finished samples without a reward, as supervised losses and custom rewards of the trainer do"
    )
    release_committed: bool = setting(
        False, "delete the samples of committed steps; without it they can be read back after the run"
    )

    def __post_init__(self) -> None:
        check_keys(self.multimodal_keys)
        for name, columns in self.eval_columns.items():
            if not isinstance(columns, dict) or not all(
                key in COLUMNS and isinstance(value, str) for key, value in columns.items()
            ):
                raise InvalidSetting(
                    f"eval_columns: {name}: got {columns!r}, expected names of columns: {', '.join(COLUMNS)}",
                    field=f"eval_columns.{name}",
                    value=columns,
                    expected=", ".join(COLUMNS),
                )

    def evaluation_sets(self) -> dict[str, str]:
        """Path by name, in the order given. Raises InvalidSetting for a name without a path or a name given twice."""
        words = [w for item in self.eval_prompt_data or [] for w in ([item] if isinstance(item, str) else item)]
        if len(words) == 1:
            words = ["aime", *words]
        if len(words) % 2 or not all(isinstance(word, str) for word in words):
            raise InvalidSetting(
                f"--eval-prompt-data: got {' '.join(map(str, words))!r}, expected pairs of NAME PATH",
                field="--eval-prompt-data",
                value=words,
                expected="pairs of NAME PATH",
            )
        sets: dict[str, str] = {}
        for name, path in zip(words[::2], words[1::2], strict=True):
            if name in sets or name == "train" or not name.strip():
                reason = "reserved" if name == "train" else "given twice" if name in sets else "empty"
                raise InvalidSetting(
                    f"--eval-prompt-data: the name {name!r} is {reason}",
                    field="--eval-prompt-data",
                    value=name,
                    expected="a name of its own for each set",
                )
            sets[name] = path
        return sets
