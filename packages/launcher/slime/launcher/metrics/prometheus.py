"""Prometheus metrics of a run and the health of all its services, on one port of the launcher: --metrics-port.

GET /metrics needs the run's `read` token as a bearer token; GET /health needs none and answers 200 or 503.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from slime.launcher.metrics.sinks.base import Metrics, Sink
from slime.launcher.platform.http_server import LimitedHandler, LimitedServer
from slime.types.clients import BufferClient, RolloutClient, TrainerClient
from slime.types.clients.base import Client
from slime.types.errors import PortInUse, SlimeError
from slime.types.rpc import RpcSettings

log = logging.getLogger(__name__)

# A scrape has ten seconds by default; a service that hangs must not take them all.
CALL_SECONDS = 2.0
# Everybody may request the health; however often they do, the services are asked at most once in this time.
HEALTH_SECONDS = 1.0
REQUEST_SECONDS = 10.0
ASKING = 16


class PrometheusServer(Sink):
    """Serves the metrics of the report, whose sink it is and whose end closes it, and those of the services."""

    def __init__(self, host: str, port: int, *, num_steps: Callable[[], int]) -> None:
        """port: 0 lets the system choose. num_steps: returns the iterations of the run. Raises PortInUse."""
        self._num_steps = num_steps
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._values: Metrics = {}
        self._done = 0
        self._written = time.time()
        self._token: str | None = None
        self._clients: dict[str, Client] = {}
        self._health: tuple[float, dict[str, bool]] = (-math.inf, {})
        self._asking = ThreadPoolExecutor(ASKING, thread_name_prefix="metrics")
        self._registry = CollectorRegistry()
        self._registry.register(self)
        handler = type("Handler", (_Handler,), {"exporter": self})
        try:
            self._server = LimitedServer((host, port), handler)
        except OSError as error:
            raise PortInUse(
                f"--metrics-port {port}: cannot listen on {host}: {error.strerror}",
                field="--metrics-port", value=port, expected="a free port",
            ) from error  # fmt: skip
        self.address = f"{host}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def watch(self, addresses: Mapping[str, str], settings: RpcSettings, token: str) -> None:
        """Asks these services, by name, from now on. token: the bearer token that scrapers must send."""
        impatient = dataclasses.replace(settings, call_timeout_seconds=CALL_SECONDS, retry_seconds=0.0)
        kinds: dict[str, type[Client]] = {"buffer": BufferClient, "rollout": RolloutClient}
        clients = {n: kinds.get(n, TrainerClient)(address, settings=impatient) for n, address in addresses.items()}
        with self._lock:
            self._clients = clients
            self._token = token
            self._health = -math.inf, {}

    def start(self, first_step: int, evaluation: Metrics | None) -> None:
        with self._lock:
            self._done = first_step

    def write(self, step: int, metrics: Metrics) -> None:
        with self._lock:
            self._values |= metrics
            self._written = time.time()
            self._done = step + ("perf/step_time" in metrics)

    def close(self, *, failed: bool) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._asking.shutdown(wait=False, cancel_futures=True)
        for client in self._clients.values():
            client.close()

    def allows(self, authorization: str) -> bool:
        return self._token is not None and hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode())

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def health(self) -> dict[str, bool]:
        """Returns whether each service serves, by its name; empty while the run starts."""
        # One thread asks; others that come meanwhile wait for its answer.
        with self._turn:
            with self._lock:
                asked_at, serving = self._health
                clients = dict(self._clients)
            if time.monotonic() - asked_at > HEALTH_SECONDS:
                serving = dict(
                    zip(clients, self._asking.map(lambda c: c.is_serving(CALL_SECONDS), clients.values()), strict=True)
                )
                with self._lock:
                    if self._clients.keys() == clients.keys():
                        self._health = time.monotonic(), serving
        return serving

    def describe(self) -> list[Metric]:
        """Returns nothing, so that the registry does not collect at registration to learn the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            values, done, written, clients = dict(self._values), self._done, self._written, dict(self._clients)
        yield GaugeMetricFamily("slime_iterations_done", "Iterations that the run has done", done)
        yield GaugeMetricFamily("slime_iterations", "Iterations of the run", self._num_steps())
        yield GaugeMetricFamily("slime_last_report_timestamp_seconds", "Time of the last row of metrics", written)
        yield _labelled("slime_metric", "Last value of each metric of metrics.jsonl", "name", values)
        yield _labelled("slime_service_up", "Whether the service answers its health check", "service", self.health())
        for name, about in (("buffer", about_buffer), ("rollout", about_rollout)):
            if name in clients:
                try:
                    yield from about(clients[name])
                except SlimeError as error:
                    log.debug("%s gives no metrics: %s", name, error)


def about_buffer(client: Any) -> list[Metric]:
    stats = client.stats()
    return [
        _labelled("slime_buffer_groups", "Groups in the buffer by their state", "state", stats.groups),
        _labelled("slime_buffer_rejected_groups", "Groups rejected, by reason", "reason", stats.rejected),
        GaugeMetricFamily("slime_buffer_payload_bytes", "Bytes of samples that the buffer holds", stats.payload_bytes),
        GaugeMetricFamily(
            "slime_buffer_damaged_payloads", "Groups whose samples were damaged or missing", stats.damaged_payloads
        ),
        GaugeMetricFamily("slime_buffer_epoch", "Passes over the prompt data that have begun", stats.epoch),
        CounterMetricFamily("slime_buffer_expired_leases", "Leases that expired", stats.expired_leases),
    ]


def about_rollout(client: Any) -> list[Metric]:
    status = client.status()
    healthy = {engine.name: engine.healthy for engine in status.engines}
    versions = {engine.name: engine.weight_version for engine in status.engines if not engine.keeps_weights}
    return [
        GaugeMetricFamily("slime_rollout_running", "Generate and Evaluate calls that run", status.running_rollouts),
        GaugeMetricFamily("slime_weight_version", "Weight version of the engines", status.weight_version),
        _labelled("slime_engine_healthy", "Whether the engine answers", "engine", healthy),
        _labelled(
            "slime_engine_weight_version", "Weight version of each engine of the trained model", "engine", versions
        ),
    ]


def _labelled(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, about, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], float(value))
    return family


class _Handler(LimitedHandler):
    exporter: PrometheusServer
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/health":
            services = self.exporter.health()
            status = "starting" if not services else "ok" if all(services.values()) else "failing"
            code = HTTPStatus.OK if status == "ok" else HTTPStatus.SERVICE_UNAVAILABLE
            self._answer(code, "application/json", json.dumps({"status": status, "services": services}).encode())
        elif path != "/metrics":
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"/metrics or /health\n")
        elif not self.exporter.allows(self.headers.get("Authorization", "")):
            self._answer(HTTPStatus.UNAUTHORIZED, "text/plain", b"send the run's read token as a bearer token\n")
        else:
            self._answer(HTTPStatus.OK, CONTENT_TYPE_LATEST, self.exporter.text())

    def _answer(self, code: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        if code is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: Any) -> None:
        log.debug(format, *values)
