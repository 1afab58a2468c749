"""Checks that the plug-ins of a run load, and take the arguments that they will be called with."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from slime.launcher.config.catalogue import declared
from slime.launcher.runner.flags import AGENT_ROLLOUT
from slime.rollout.agents.settings import AgentSettings
from slime.rollout.rewards.registry import reward_function
from slime.types.errors import ConfigError, InvalidSetting, NotAvailable
from slime.types.plugin_contracts import CONTRACTS
from slime.types.plugins import load_plugin
from slime.types.setting_values import flag_name


def check_plugins(args: Mapping[str, Any]) -> None:
    """Loads every plug-in that is set and checks its parameters; raises PluginError.

    Raises InvalidSetting or NotAvailable for an unknown built-in reward.
    """
    flags = declared()
    if args["rm_type"]:
        reward_function(args["rm_type"])
    for name, overrides in args["eval_overrides"].items():
        for key in ("custom_rm_path", "custom_generate_function_path"):
            if overrides.get(key):
                load_plugin(overrides[key], flag=flag_name(key), label=f"--eval-config: {name}.{key}")
        if overrides.get("rm_type"):
            try:
                reward_function(overrides["rm_type"])
            except ConfigError as error:
                raise error.at(f"--eval-config: {name}") from None
    for name, flag in flags.items():
        value = args.get(name)
        if flag_name(name) in CONTRACTS and value and value != flag.default:
            for path in value if isinstance(value, list) else [value]:
                load_plugin(path, flag=flag_name(name))
    if args["rollout_function_path"] == AGENT_ROLLOUT or args["custom_agent_path"]:
        _check_agents(args)


def _check_agents(args: Mapping[str, Any]) -> None:
    if args["use_rollout_routing_replay"]:
        raise InvalidSetting.conflict(
            "--use-rollout-routing-replay", f"--rollout-function-path {AGENT_ROLLOUT}",
            "agents get no experts back; --use-routing-replay replays those of the trainer",
        )  # fmt: skip
    # Plug-ins get SGLang's flags under these names from the rollout service, too.
    of_sglang = {f"sglang_{name}": value for name, value in args["sglang_args"].items()}
    settings = AgentSettings.from_args(SimpleNamespace(**{**args, **of_sglang}))
    if settings.region is not None and importlib.util.find_spec("boto3") is None:
        raise NotAvailable.requires(
            f"agent_runtime_arn {settings.agent_runtime_arn}",
            "the package boto3",
            'pip install "slime-rollout[agents]", or use a URL http://HOST:PORT/invocations',
        )
