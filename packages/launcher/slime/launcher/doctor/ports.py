"""Checks the ports that services listen on, and the addresses that a run calls."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from slime.launcher.doctor.finding import Finding, Subject, fail, ok, warn
from slime.launcher.platform import probes
from slime.rollout.settings.served_models import MODEL_SCHEME
from slime.types.errors import counted

# Buffer, rollout, torch's rendezvous, an engine and its parts; and one for each rank.
SERVICES = 12
RAY_PORT = 6379
RAY_PORTS = {
    RAY_PORT: ("`ray start --head`", "--port"),
    8265: ("Ray's dashboard and `ray job submit`", "--dashboard-port"),
}


def check_ports(subject: Subject) -> Iterator[Finding]:
    needed = SERVICES + int(subject.flag("actor_num_gpus_per_node") or 1)
    count = probes.free_ports(needed)
    if count < needed:
        yield fail(
            f"the system gives out {max(count, 0)} of {counted(needed, 'port')} on 127.0.0.1",
            "stop the processes that hold them, or widen net.ipv4.ip_local_port_range",
        )
    else:
        yield ok("free ports on 127.0.0.1: enough")
    yield from _of_ray()
    for flag, host, number in _called(subject):
        if probes.answers(host, number):
            yield ok(f"{flag} {host}:{number}: a server listens there")
        else:
            yield fail(f"{flag} {host}:{number}: no server answers", "start it first, or correct the address")


def _of_ray() -> Iterator[Finding]:
    """Checks the fixed ports of `ray start --head`; the system chooses every other port."""
    for port, (service, flag) in RAY_PORTS.items():
        if probes.port_is_free(port):
            continue
        local = probes.local_ray_address() or ""
        if local.endswith(f":{RAY_PORT}") and probes.answers("127.0.0.1", RAY_PORT):
            continue
        yield warn(
            f"port {port} of {service} is in use, and not by a Ray of this machine",
            f"`ray start --head {flag} N` with another N, or end what listens there (ss -ltnp 'sport = :{port}')",
        )


def _called(subject: Subject) -> Iterator[tuple[str, str, int]]:
    addresses = [("--rollout-external-engine-addrs", a) for a in subject.flag("rollout_external_engine_addrs") or ()]
    if subject.flag("rm_url") and urlsplit(subject.flag("rm_url")).scheme != MODEL_SCHEME:
        addresses.append(("--rm-url", subject.flag("rm_url")))
    for flag, address in addresses:
        parts = urlsplit(address if "://" in address else f"//{address}")
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            continue  # an address without a port is reported with the flags
        yield flag, parts.hostname or "", port
