"""What the training loop does, and which half of the system a run leaves out."""

from __future__ import annotations

from dataclasses import dataclass

from slime.types.settings import setting


@dataclass(kw_only=True)
class LoopSettings:
    """The training loop."""

    num_rollout: int | None = setting(
        None,
        "rollouts to run, each followed by training on it (required, but with --num-epoch); 0 only evaluates",
        minimum=0,
    )
    num_epoch: int | None = setting(
        None,
        "passes over --prompt-data to run, in place of --num-rollout: each of as many whole rollouts as it fills; what "
        "--save-interval and --eval-interval ask for is done at the end of each, too",
        minimum=1,
    )
    start_rollout_id: int | None = setting(
        None, "number of the first rollout (default: the one after the checkpoint's, else 0)", minimum=0
    )
    update_weights_interval: int = setting(
        1, "push the weights to the engines after every N rollouts, and before each evaluation", minimum=1
    )
    async_buffer_size: int | None = setting(
        None,
        "of `slime train-async`: rollouts that are generated, or being generated, while the trainer has not begun with "
        "them, at most (default: 1)",
        minimum=1,
    )

    debug_rollout_only: bool = setting(False, "only generate and evaluate: no trainer is started")
    debug_train_only: bool = setting(
        False, "only train, on the rollouts of --load-debug-rollout-data: no engine is started, nothing is evaluated"
    )
    load_debug_rollout_data: str | None = setting(
        None,
        "recorded rollouts to train on, {rollout_id} in the path is replaced; turns on --debug-train-only",
        metavar="PATH",
    )
    load_debug_rollout_data_subsample: float | None = setting(
        None, "share of the groups of each of them to train on, from its beginning and its end", above=0, maximum=1
    )
    dump_details: str | None = setting(
        None,
        "directory of what each rollout generates (rollout_data/) and trains on (train_data/): sets "
        "--save-debug-rollout-data and --save-debug-train-data",
        metavar="DIR",
    )
