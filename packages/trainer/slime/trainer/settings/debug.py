"""Settings that look inside a trainer: profiles, memory records and dumps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from slime.types.errors import InvalidSetting
from slime.types.setting_values import flag_name
from slime.types.settings import setting, spelled

# Near the beginning of a file of --save-debug-train-data.
TRAIN_DATA_FORMAT = "slime-train-data-1"
PROFILE_TARGETS = ("train_overall", "train_actor", "train_log_probs")


@dataclasses.dataclass(kw_only=True)
class DebugSettings:
    """Debugging of the trainer."""

    use_pytorch_profiler: bool = setting(
        False, "Trace the training of some iterations with torch's profiler; see --profile-target", aliases=("profile",)
    )
    profile_target: list[str] = setting(
        lambda: ["train_overall"],
        "Parts to trace, one file each: the whole training of an iteration, its updates, its log-probs",
        choices=PROFILE_TARGETS,
    )
    profile_step_start: int = setting(0, "First iteration that is traced, counted from 0", minimum=0)
    profile_step_end: int | None = setting(
        None, "Iteration before which tracing ends (default: the one after --profile-step-start)", minimum=1
    )
    profile_dir: str | None = setting(
        None, "Directory of the traces (default: profiles below --output-dir)", metavar="DIR"
    )
    record_memory_history: bool = setting(False, "Record memory allocations; see --memory-recorder")
    memory_recorder: str = setting(
        "torch",
        "Recorder of memory: torch records GPU memory, for pytorch.org/memory_viz; memray records process "
        "memory (requires memray)",
        choices=("torch", "memray"),
    )
    memory_snapshot_dir: str | None = setting(
        None, "Directory of memory records (default: memory below --output-dir)", metavar="DIR"
    )
    memory_snapshot_num_steps: int | None = setting(
        None,
        "Iterations after which the memory record is written and ends (default: when the trainer stops)",
        minimum=1,
    )
    save_debug_train_data: str | None = setting(
        None,
        "File (safetensors) of what each iteration trains on; {rollout_id} and {rank} in the path are replaced. A path "
        "without {rollout_id} keeps the last iteration; several ranks need {rank}",
        metavar="PATH",
    )

    def check_debugging(self) -> None:
        """Raises InvalidSetting where these settings contradict each other."""
        if self.profile_step_end is not None and self.profile_step_end <= self.profile_step_start:
            raise InvalidSetting.conflict(
                spelled(self, "profile_step_end"),
                spelled(self, "profile_step_start"),
                "tracing must end after it starts",
            )
        for name, switch in (
            ("profile_step_end", "use_pytorch_profiler"),
            ("profile_dir", "use_pytorch_profiler"),
            ("memory_snapshot_num_steps", "record_memory_history"),
            ("memory_snapshot_dir", "record_memory_history"),
        ):
            if getattr(self, name) is not None and not getattr(self, switch):
                raise InvalidSetting.requires(spelled(self, name), spelled(self, switch))
        check_template(self.save_debug_train_data)


def check_template(path: str | None, ranks: int = 1) -> None:
    """Raises InvalidSetting for other fields in --save-debug-train-data, and where ranks would share a file."""
    if path is None:
        return
    flag = flag_name("save_debug_train_data")
    try:
        paths = {Path(path.format(rollout_id=0, rank=rank)) for rank in (0, 1)}
    except (KeyError, IndexError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InvalidSetting.must_be(
            flag, "a path with no fields but {rollout_id} and {rank}", got=path, reason=reason
        ) from None
    if not all(each.name for each in paths):
        raise InvalidSetting.must_be(flag, "the path of a file", got=path)
    if ranks > 1 and len(paths) == 1:
        raise InvalidSetting.must_be(flag, "a path with {rank} in it", got=path, reason=f"there are {ranks} ranks")
