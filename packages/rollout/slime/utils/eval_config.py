"""Compatibility: `slime.utils.eval_config`, the evaluation sets of a run as `args.eval_datasets` has them."""

from slime.rollout.settings.eval_datasets import EvalDatasetConfig, build_eval_dataset_configs, ensure_dataset_list

__all__ = [
    "EvalDatasetConfig",
    "build_eval_dataset_configs",
    "ensure_dataset_list",
]
