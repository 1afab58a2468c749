"""Checks Ray: its installation, the cluster that the flags name, and leftovers of an old cluster."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

from slime.launcher.doctor.finding import Finding, Subject, fail, ok, warn
from slime.launcher.platform import probes
from slime.launcher.platform.ray_cluster import address_for_auto
from slime.types.addresses import split_address
from slime.types.errors import InvalidSetting, Unavailable


def check_ray(subject: Subject) -> Iterator[Finding]:
    if importlib.util.find_spec("ray") is None:
        yield fail("ray is not importable", "pip install 'ray[default]>=2.52'")
        return
    address = subject.flag("ray_address") or os.environ.get("RAY_ADDRESS")
    name = "--ray-address" if subject.flag("ray_address") else "RAY_ADDRESS"
    nodes = subject.flag("actor_num_nodes") or 1
    if nodes > 1 and not address:
        yield fail(f"--actor-num-nodes {nodes}: no Ray cluster to run on", "ray start --head, then --ray-address auto")
    local = probes.local_ray_address()
    alive = local is not None and _answers(local)
    if address == "auto":
        try:
            joined = address_for_auto(name)
        except Unavailable as error:
            problem, _, remedy = error.message.partition("; ")
            yield fail(problem, remedy)
            return
        if _answers(joined):
            yield ok(f"Ray answers at {joined}")
            yield from _check_token(joined)
        else:
            yield fail(f"{name} auto: the Ray of this user, {joined}, does not answer", "ray stop; ray start --head")
    elif address:
        if _answers(address):
            yield ok(f"{name} {address}: a server listens there")
            yield from _check_token(address)
        else:
            yield fail(
                f"{name} {address}: no server answers",
                "run ray start --head there, open the port, or correct the address",
            )
    elif local is not None and not alive:
        yield warn(
            f"a Ray cluster at {local} was left behind: it does not answer", "ray stop clears what is left of it"
        )
    elif alive:
        yield ok(f"a Ray cluster runs at {local}; a run without --ray-address starts one of its own beside it")
    else:
        yield ok("Ray: a run starts one of its own")


def _check_token(address: str) -> Iterator[Finding]:
    if probes.ray_without_token(address.split("://")[-1]):
        yield fail(
            f"Ray at {address} answers without a token: whoever reaches it can run code as its user",
            "ray get-auth-token --generate; RAY_AUTH_MODE=token ray start --head",
        )


def _answers(address: str) -> bool:
    try:
        return probes.answers(*split_address(address.split("://")[-1]))
    except InvalidSetting:
        return False
