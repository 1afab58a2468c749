"""Settings of a buffer: flags, and keys of a `--config` file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.buffer.sources.media import check_keys
from slime.buffer.store.urls import PAYLOADS, STORE, check_url
from slime.types.errors import InvalidSetting
from slime.types.models.vision import IMAGE
from slime.types.prompt_files.slices import split_slice
from slime.types.settings import json_object, setting
from slime.types.shared_settings import GroupSettings, PromptSettings

# Settings of columns that a single evaluation set may override.
COLUMNS = ("input_key", "label_key", "metadata_key", "tool_key", "multimodal_keys")
NUCLEI = ("any", "required", "refused")


@dataclass(kw_only=True)
class BufferSettings(GroupSettings, PromptSettings):
    """Data buffer."""

    prompt_data: str | None = setting(
        None,
        "Training prompts: a .jsonl, .jsonl.gz, .json, .csv or .parquet file, of which PATH@[a:b] takes rows a to b, "
        "or reasoning_gym:NAME?size=1000&seed=42. `slime train` also takes a data set on the Hub, "
        "ORG/NAME[:CONFIG][:SPLIT][@REVISION]",
        metavar="PATH",
    )
    rollout_global_dataset: bool = setting(
        True,
        "Read prompts from --prompt-data",
        off_flag="disable-rollout-global-dataset",
        off_help="Ignore --prompt-data: prompts come from clients only",
    )
    input_key: str = setting("input", "Column of the prompt: text, or a list of chat messages", metavar="NAME")
    label_key: str | None = setting(None, "Column of the label, any JSON value", metavar="NAME")
    metadata_key: str = setting("metadata", "Column of a JSON object that travels with the sample", metavar="NAME")
    tool_key: str = setting("tools", 'Column of tool definitions; they become metadata["tools"]', metavar="NAME")
    multimodal_keys: dict[str, str] = setting(
        dict,
        'Columns of media as a JSON object, {"image": "images"}: each `<image>` of a prompt takes the next '
        "item of that column",
        parse=json_object,
    )
    rollout_shuffle: bool = setting(False, "Shuffle the prompts differently in each epoch")

    eval_prompt_data: list[list[str]] | None = setting(
        None,
        "Evaluation sets: a name and a file for each; may be repeated. A single PATH is named after its file",
        metavar="NAME PATH",
        append=True,
    )
    eval_input_key: str | None = setting(
        None, "Column of the prompt in evaluation sets (default: --input-key)", metavar="NAME"
    )
    eval_label_key: str | None = setting(
        None, "Column of the label in evaluation sets (default: --label-key)", metavar="NAME"
    )
    eval_tool_key: str | None = setting(
        None, "Column of tool definitions in evaluation sets (default: --tool-key)", metavar="NAME"
    )

    eval_columns: dict[str, Any] = setting(
        dict, "Columns of single evaluation sets by name: {NAME: {label_key: answer}}", flag=False
    )

    buffer_dir: str | None = setting(
        None, "Directory of the buffer's state (default: a temporary one, removed at the end)", metavar="DIR"
    )
    buffer_store: str | None = setting(
        None,
        "PostgreSQL database that keeps the state in place of SQLite, postgresql://[USER@]HOST[:PORT]/DATABASE without "
        "a password, one for each run; the samples lie in --buffer-dir or --buffer-payloads",
        metavar="URL",
    )
    buffer_payloads: str | None = setting(
        None,
        "Object store that keeps the samples in place of files, s3://BUCKET[/PREFIX], a prefix for each run; "
        "credentials and endpoint come from the environment, as for all clients of AWS",
        metavar="URL",
    )
    data_place: str | None = setting(
        None,
        "File with the place in the data to begin at, data_place.jsonl of a checkpoint; ignored by a "
        "--buffer-dir that was used before (default of `slime train`: the file of the checkpoint in --load)",
        metavar="FILE",
    )
    buffer_durability: str = setting(
        "process",
        "Failure that a completed group survives: process, the death of the buffer; power, a power cut too, "
        "and each write waits for the disk",
        choices=("process", "power"),
    )
    buffer_filter_path: str | None = setting(
        None, "Function that chooses among waiting groups: fn(args, None, groups, n) -> groups", metavar="PATH"
    )
    lease_seconds: float = setting(
        600.0, "Seconds that a lease lasts unless the worker asks for another time", above=0, maximum=604800
    )
    max_group_mb: int = setting(1024, "Largest group that is accepted, all samples together, in MiB", minimum=1)
    max_prompts_mb: int = setting(256, "Largest AddPrompts call that is accepted, in MiB", minimum=1)
    allow_missing_rewards: bool = setting(
        False,
        "Accept finished samples without a reward, for supervised losses and for rewards that the trainer computes",
    )
    scalar_rewards: bool = setting(
        False,
        "Refuse finished samples whose reward is a dict without a number at --reward-key (on in `slime train`, unless "
        "rewards may be missing)",
    )
    max_token_id: int | None = setting(
        None,
        "Largest id that a token of a finished sample may have (in `slime train`, that of the model's vocabulary)",
        minimum=1,
    )
    log_probs_required: bool = setting(
        False,
        "Refuse finished samples without the engine's log-probs (on in `slime train` where the trainer reads them)",
    )
    text_only: bool = setting(
        False, "Refuse finished samples with images (on in `slime train` for models that read text only)"
    )
    nuclei: str = setting(
        "any",
        "Whether finished samples tell from which tokens each token was sampled, in rollout_top_p_token_ids: required, "
        "refused, or any (in `slime train`: required with --rollout-top-p and --rollout-top-k, else refused)",
        choices=NUCLEI,
    )
    release_committed: bool | None = setting(
        None,
        "Delete the samples of a step once a checkpoint holds it. A run that goes back to an older checkpoint then "
        "generates them again (default: on; in `slime train`, off with --debug-rollout-only, --no-save-optim and "
        "--ref-update-interval)",
    )

    def __post_init__(self) -> None:
        check_keys(self.multimodal_keys)
        if self.buffer_store is not None:
            check_url(STORE, self.buffer_store)
            if self.buffer_dir is None and self.buffer_payloads is None:
                raise InvalidSetting.requires(STORE, f"--buffer-dir DIR or {PAYLOADS} URL", "the samples lie there")
        if self.buffer_payloads is not None:
            check_url(PAYLOADS, self.buffer_payloads)
            if self.buffer_dir is None and self.buffer_store is None:
                raise InvalidSetting.requires(PAYLOADS, f"--buffer-dir DIR or {STORE} URL", "the state lies there")
        for name, columns in self.eval_columns.items():
            if not isinstance(columns, dict) or not all(map(_is_column, columns, columns.values())):
                raise InvalidSetting.must_be(
                    f"eval_columns.{name}", f"names of columns by {', '.join(COLUMNS)}", got=columns
                )

    def evaluation_sets(self) -> dict[str, str]:
        """Returns the paths of evaluation sets by name, in the order given; a PATH alone is named after its file.

        Raises InvalidSetting for a name without a path or a name given twice.
        """
        words = [w for item in self.eval_prompt_data or [] for w in ([item] if isinstance(item, str) else item)]
        if len(words) == 1 and isinstance(words[0], str):
            words = [Path(split_slice(words[0])[0]).stem, *words]
        if len(words) % 2 or not all(isinstance(word, str) for word in words):
            got = " ".join(map(str, words))
            raise InvalidSetting.must_be("--eval-prompt-data", "pairs of NAME PATH", got=got)
        sets: dict[str, str] = {}
        for name, path in zip(words[::2], words[1::2], strict=True):
            if name in sets or name == "train" or not name.strip():
                reason = "reserved" if name == "train" else "given twice" if name in sets else "empty"
                raise InvalidSetting.must_be(
                    "--eval-prompt-data",
                    "pairs of NAME PATH with a name each",
                    got=name,
                    reason=f"the name is {reason}",
                )
            sets[name] = path
        return sets


def _is_column(key: str, value: Any) -> bool:
    if key == "multimodal_keys":
        return (
            isinstance(value, dict) and set(value) <= {IMAGE} and all(isinstance(name, str) for name in value.values())
        )
    return key in COLUMNS and isinstance(value, str)
