"""Metrics of a run for Prometheus, the health of its services, and the dashboard that shows them."""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from slime.buffer.service import serve
from slime.buffer.settings import BufferSettings
from slime.launcher.config import run_config
from slime.launcher.metrics.prometheus import PrometheusServer, about_rollout
from slime.launcher.metrics.report import COLUMNS, Report
from slime.types.clients.rollout import Engine, RolloutStatus
from slime.types.errors import InvalidSetting, PortInUse
from slime.types.rpc import RpcSettings

DASHBOARD = Path(__file__).parents[4] / "docs" / "grafana.json"
TOKEN = "of-the-read-role"


@pytest.fixture
def exporter() -> Iterator[PrometheusServer]:
    server = PrometheusServer("127.0.0.1", 0, num_steps=lambda: 7)
    yield server
    server.close(failed=False)


def get(exporter: PrometheusServer, path: str, token: str = "") -> tuple[int, str]:
    request = urllib.request.Request(f"http://{exporter.address}{path}")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def values(text: str) -> dict[tuple[str, ...], float]:
    """Returns the samples of a scrape by their name and the values of their labels."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_a_scrape_has_the_metrics_of_the_run_and_of_its_services(exporter: PrometheusServer, tmp_path: Path) -> None:
    assert get(exporter, "/health") == (503, '{"status": "starting", "services": {}}')
    assert get(exporter, "/metrics", TOKEN)[0] == 401, "no token is known yet"
    with (
        serve(BufferSettings(n_samples_per_prompt=2)) as buffer,
        Report(tmp_path, num_steps=7, console=Console(quiet=True)) as report,
    ):
        exporter.watch({"buffer": buffer.address}, RpcSettings(), TOKEN)
        report.attach(exporter)
        report.started(1, 3)
        report.step(3, {"train/loss": 0.5, "perf/step_time": 1.0, "train/kl": float("nan")}, [])
        report.evaluation(4, {"eval/sums": 0.25, "perf/eval_time": 1.0}, [])
        assert get(exporter, "/health") == (200, '{"status": "ok", "services": {"buffer": true}}')
        status, text = get(exporter, "/metrics", TOKEN)
        found = values(text)
        assert status == 200 and "train/kl" in text
        for key, value in {
            ("slime_iterations_done",): 4, ("slime_iterations",): 7, ("slime_metric", "train/loss"): 0.5,
            ("slime_metric", "eval/sums"): 0.25, ("slime_service_up", "buffer"): 1, ("slime_buffer_epoch",): 0,
            ("slime_buffer_expired_leases_total",): 0,
        }.items():  # fmt: skip
            assert found[key] == value, key


def test_metrics_need_the_token_and_nothing_else_is_served(exporter: PrometheusServer) -> None:
    exporter.watch({}, RpcSettings(), TOKEN)
    assert [get(exporter, "/metrics", token)[0] for token in ("", "another", TOKEN)] == [401, 401, 200]
    assert get(exporter, "/", TOKEN)[0] == 404


def test_a_service_that_is_gone_is_down_and_the_rest_is_still_served(exporter: PrometheusServer) -> None:
    with serve(BufferSettings(n_samples_per_prompt=2)) as buffer:
        exporter.watch({"buffer": buffer.address, "trainer-0": "127.0.0.1:9"}, RpcSettings(), TOKEN)
        status, text = get(exporter, "/health")
        assert (status, json.loads(text)["services"]) == (503, {"buffer": True, "trainer-0": False})
        found = values(get(exporter, "/metrics", TOKEN)[1])
        assert found["slime_service_up", "trainer-0"] == 0 and found["slime_service_up", "buffer"] == 1
    exporter.watch({"buffer": buffer.address}, RpcSettings(), TOKEN)
    assert ("slime_iterations",) in values(get(exporter, "/metrics", TOKEN)[1])


def test_however_many_ask_for_the_health_at_once_the_services_are_asked_once(exporter: PrometheusServer) -> None:
    asked = 0
    everyone = threading.Barrier(8)

    class Service:
        def is_serving(self, timeout: float) -> bool:
            nonlocal asked
            asked += 1
            return True

        def close(self) -> None: ...

    def ask(_: int) -> dict[str, bool]:
        everyone.wait(20)
        return exporter.health()

    exporter._clients = {"buffer": Service()}  # type: ignore[dict-item]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(8))) == [{"buffer": True}] * 8
    assert asked == 1


def test_a_port_that_is_taken_is_named(exporter: PrometheusServer) -> None:
    port = int(exporter.address.rpartition(":")[2])
    with pytest.raises(PortInUse, match=f"--metrics-port {port}: cannot listen on 127.0.0.1"):
        PrometheusServer("127.0.0.1", port, num_steps=lambda: 0)


def test_a_host_requires_a_port() -> None:
    words = ["--hf-checkpoint", "m", "--prompt-data", "p.jsonl", "--num-rollout", "2", "--metrics-host", "192.0.2.7"]
    with pytest.raises(InvalidSetting, match="--metrics-host 192.0.2.7 requires --metrics-port N"):
        run_config.parse(words, check=False, environment={})


def test_an_engine_that_gets_no_updates_has_no_weight_version_to_raise_an_alarm() -> None:
    policy = Engine("engine-0", "", "embedded", healthy=True, weight_version=3, model="policy")
    judge = Engine("engine-1", "", "embedded", healthy=False, weight_version=0, model="judge", keeps_weights=True)
    families = about_rollout(SimpleNamespace(status=lambda: RolloutStatus([policy, judge], 3, 1)))
    shown = {family.name: [(*sample.labels.values(), sample.value) for sample in family.samples] for family in families}
    assert shown["slime_engine_weight_version"] == [("engine-0", 3)]
    assert shown["slime_engine_healthy"] == [("engine-0", 1), ("engine-1", 0)]


def test_every_query_of_the_dashboard_is_of_something_exported(exporter: PrometheusServer) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    with serve(BufferSettings(n_samples_per_prompt=2)) as buffer:
        exporter.watch({"buffer": buffer.address}, RpcSettings(), TOKEN)
        text = get(exporter, "/metrics", TOKEN)[1]
    engine = Engine("engine-0", "http://127.0.0.1:1", "embedded", healthy=True, weight_version=3)
    families = about_rollout(SimpleNamespace(status=lambda: RolloutStatus([engine], 3, 1)))
    families += text_string_to_metric_families(text)
    exported = {name for family in families for name in (family.name, f"{family.name}_total")}
    asked = {name for query in queries for name in re.findall(r"\bslime_\w+", query)}
    assert len(asked) > 10 and asked <= exported
    named = {name for query in queries for name in re.findall(r'name="([^"$]+)"', query)}
    assert named <= {key for _, key, _ in COLUMNS} | {"rollout/staleness"}
