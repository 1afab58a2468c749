"""The type of `args`, the flat namespace that plug-ins get."""

from __future__ import annotations

from slime.rollout.settings.eval_datasets import EvalDatasetConfig
from slime.rollout.settings.rollout import RolloutSettings


class RolloutArgs(RolloutSettings):
    """Names the attributes of `args` for type checkers; nothing makes an instance.

    At run time `args` is an `argparse.Namespace`, made by `flat_args` (generate/state.py): it has every setting of the
    rollout, the attributes below, SGLang's flags as `sglang_NAME`, and under `slime train` the settings of the other
    packages. Code reads a name that is not declared here with `getattr(args, name, default)`.
    """

    # Where the engines are; None while no engine has an address. Copies of `args` share the list and the dictionary.
    rollout_engine_urls: list[str]
    sglang_router_ip: str | None
    sglang_router_port: int | None
    sglang_model_routers: dict[str, tuple[str | None, int | None]]

    # Names that slime's plug-ins read.
    eval_datasets: list[EvalDatasetConfig]
    sglang_tp_size: int
    sglang_dp_size: int
    sglang_enable_deterministic_inference: bool
    use_distributed_post: bool
    use_slime_router: bool
    ci_test: bool
