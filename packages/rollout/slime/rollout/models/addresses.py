"""Addresses of the models of a run, for plug-ins.

from slime.rollout.models import model_url

answer = await post(model_url(args, "judge", "/v1/chat/completions"), {"messages": messages})
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from slime.rollout.settings.model_file import DEFAULT_MODEL
from slime.rollout.settings.served_models import MODEL_SCHEME
from slime.types.addresses import join_address
from slime.types.errors import NotFound

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs

# Code written for slime calls the trained model so, in runs with one model too.
ACTOR = "actor"


def model_url(args: RolloutArgs, name: str = DEFAULT_MODEL, path: str = "/generate") -> str:
    """Returns the URL of `path` at the router of a model's engines, which `engine_headers(url)` has the key for.

    name: that in the file of --sglang-config; "default" is the trained model, and so is "actor" where no model has that
    name. Raises NotFound for a name that the run does not have.
    """
    routers = getattr(args, "sglang_model_routers", None) or {}
    if name in routers:
        host, port = routers[name]
    elif name in (DEFAULT_MODEL, ACTOR):
        host, port = args.sglang_router_ip, args.sglang_router_port
    else:
        known = ", ".join({DEFAULT_MODEL: None, **routers})
        raise NotFound(
            f"the run serves no model {name!r}; it serves {known}. The file of --sglang-config names the models",
            field="model_name", value=name, expected=f"one of {known}",
        )  # fmt: skip
    if host is None or port is None:
        raise NotFound(f"no engine serves the model {name!r} in this run", field="model_name", value=name)
    return f"http://{join_address(host, int(port))}{path}"


def reward_url(args: RolloutArgs) -> str:
    """Returns --rm-url, and for model://NAME/PATH the URL of that model of the run. Raises NotFound as `model_url`."""
    url = str(args.rm_url)
    parts = urlsplit(url)
    return model_url(args, parts.netloc, parts.path or "/generate") if parts.scheme == MODEL_SCHEME else url
