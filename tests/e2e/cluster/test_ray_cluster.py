"""Jobs on a Ray cluster of several nodes, submitted as the recipes do it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from ray_cluster import RayCluster
from slime.converters.cli import main as convert
from slime.launcher.quickstart import reverse
from slime.rollout.recordings.rollouts import read_rollout
from slime.types.clients import TrainerClient
from slime.types.rpc import RpcSettings
from slow_cases import slow
from tiny_runs import DEADLINE, command_line, gone, metrics, trained_a_step, wait_for

SECOND = "127.0.0.2"
ROOT = Path(__file__).resolve().parents[3]
COLOCATED = ["--colocate", "--actor-num-nodes", "2", "--rollout-num-engines", "2"]

# A hook on samples, loaded where rollouts are made, from where it can note what each engine answers.
NOTING = """
    import json
    from pathlib import Path
    from slime.rollout.engines.client import EngineClient

    answer = EngineClient.generate

    async def generate(self, *args, **options):
        outputs = await answer(self, *args, **options)
        with Path(__file__).with_suffix(".jsonl").open("a") as file:
            for output in outputs:
                version = output["meta_info"]["weight_version"]
                print(json.dumps([self.name, self.url, output["meta_info"]["id"], int(version)]), file=file)
        return outputs

    EngineClient.generate = generate

    def hook(args, sample):
        pass
"""


@pytest.fixture(scope="module")
def head() -> Iterator[RayCluster]:
    with RayCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(head: RayCluster) -> RayCluster:
    """Starts a cluster of two nodes."""
    head.ensure(SECOND)
    return head


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model, train.jsonl, and tiny.sh: the shell file that a recipe sources."""
    directory = tmp_path_factory.mktemp("inputs")
    reverse.write_data(directory, 0)
    reverse.write_model(directory / "model", 0)
    assert (
        convert(["model-args", "--hf-checkpoint", str(directory / "model"), "--output", str(directory / "tiny.sh")])
        == 0
    )
    return directory


def flags(inputs: Path, output_dir: Path, num_rollout: int) -> list[str]:
    return [
        "--prompt-data", f"{inputs}/train.jsonl", "--input-key", "prompt", "--label-key", "label",
        "--custom-rm-path", "slime.launcher.quickstart.reverse.reward", "--rollout-engine", "embedded",
        "--num-rollout", str(num_rollout), "--rollout-batch-size", "4", "--n-samples-per-prompt", "4",
        "--rollout-max-response-len", "4", "--output-dir", str(output_dir),
    ]  # fmt: skip


def environment(directory: Path) -> str:
    """Environment of a job, so that it finds what this test finds from wherever Ray starts it."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    variables = {
        "PYTHONPATH": path,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    return json.dumps({"env_vars": variables})


def submit(cluster: RayCluster, name: str, script: str, *words: str) -> None:
    """Leaves the job running under `name`."""
    command = cluster.job("submit", "--submission-id", name, "--no-wait", "--runtime-env-json", environment(ROOT), "--",
                          "python3", f"{ROOT}/scripts/{script}", *words)  # fmt: skip
    assert "submitted successfully" in command, command


def test_a_job_trains_on_two_nodes_with_the_models_shell_file(
    cluster: RayCluster, inputs: Path, tmp_path: Path
) -> None:
    submission = cluster.command("submit", "--runtime-env-json", environment(ROOT))
    script = (
        f'source {inputs}/tiny.sh; "${{@}}" -- python3 {ROOT}/scripts/train.py ${{MODEL_ARGS[@]}} ${{CKPT_ARGS[@]}} '
        f"--train-backend megatron --actor-num-nodes 2 --actor-num-gpus-per-node=1 "
        + " ".join(flags(inputs, tmp_path, 2))
    )
    done = subprocess.run(
        ["bash", "-euc", script, "submit", *submission],
        env=cluster.environment, capture_output=True, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1]
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert (tmp_path / "logs" / "trainer-1.log").exists()
    assert cluster.workers() == []


def test_stopping_a_job_ends_all_that_it_started(cluster: RayCluster, inputs: Path, tmp_path: Path) -> None:
    submit(cluster, "stopped", "train_async.py", "--hf-checkpoint", f"{inputs}/model", *flags(inputs, tmp_path, 1000))
    wait_for(lambda: trained_a_step(tmp_path), DEADLINE, "a step")
    workers = cluster.workers()
    assert workers
    assert "was stopped" in cluster.job("stop", "stopped")
    wait_for(lambda: gone(workers), DEADLINE, "every process of the job has ended")


def assert_spoken_to_through_tls_only(access: Path) -> None:
    addresses = json.loads((access / "addresses.json").read_text())
    assert addresses["trainer-1"].startswith(f"{SECOND}:")
    secure = RpcSettings(token_file=str(access / "read.token"), tls_ca=str(access / "ca.pem"))
    with TrainerClient(addresses["trainer-1"], settings=secure) as client:
        assert client.info().rank == 1
    for address in addresses.values():
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, address


def test_a_lost_node_ends_the_run_with_the_name_of_what_was_on_it(
    cluster: RayCluster, inputs: Path, tmp_path: Path
) -> None:
    nodes = ["--actor-num-nodes", "2"]
    submit(cluster, "lost", "train.py", "--hf-checkpoint", f"{inputs}/model", *nodes, *flags(inputs, tmp_path, 1000))
    wait_for(lambda: trained_a_step(tmp_path), DEADLINE, "a step")
    assert_spoken_to_through_tls_only(tmp_path / "access")
    workers = cluster.workers()
    cluster.ensure(SECOND).lose()
    output = cluster.ended("lost", DEADLINE)
    assert f"ServiceDied: trainer-1 died on {SECOND}" in output and "exit code 1" in output
    wait_for(lambda: gone(workers), DEADLINE, "every process of the job has ended")


def test_engines_on_the_nodes_of_the_trainer_all_generate_with_the_weights_of_the_step(
    cluster: RayCluster, inputs: Path, tmp_path: Path
) -> None:
    noting = tmp_path / "noting.py"
    noting.write_text(textwrap.dedent(NOTING))
    words = [
        *COLOCATED, *flags(inputs, tmp_path / "run", 3), "--rollout-sample-hook-path", f"{noting}:hook",
        "--save-debug-rollout-data", f"{tmp_path}/rollout-{{rollout_id}}",
    ]  # fmt: skip
    submit(cluster, "colocated", "train.py", "--hf-checkpoint", f"{inputs}/model", *words)
    output = cluster.ended("colocated", DEADLINE)
    assert "succeeded" in output, output
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2]
    answers = [json.loads(line) for line in noting.with_suffix(".jsonl").read_text().splitlines()]
    for step in range(3):
        urls = {name: url for name, url, _, version in answers if version == step}
        assert set(urls) == {"embedded-0", "embedded-1"}
        assert len({url.rpartition(":")[0] for url in urls.values()}) == 2, "an address of each node"
        samples = [sample for group in read_rollout(tmp_path / f"rollout-{step}").groups for sample in group.samples]
        assert len(samples) == 16 and all(sample.weight_versions == [str(step)] for sample in samples)
    assert len(answers) == 3 * 16
    assert cluster.workers() == []


@slow
@pytest.mark.parametrize("killed", ["engine", "host"])
def test_an_engine_that_dies_on_another_node_than_the_rollout_service_ends_the_run_with_its_name(
    cluster: RayCluster, inputs: Path, tmp_path: Path, killed: str
) -> None:
    words = [*COLOCATED, *flags(inputs, tmp_path, 1000)]
    submit(cluster, f"dying-{killed}", "train.py", "--hf-checkpoint", f"{inputs}/model", *words)
    wait_for(lambda: trained_a_step(tmp_path), DEADLINE, "a step")
    workers = cluster.workers()
    (engine,) = [p for p in workers if {"slime.rollout.engines.embedded", SECOND} <= {*command_line(p).split()}]
    if killed == "engine":
        engine.kill()
        message = f"on {SECOND}: engine embedded-1 (pid {engine.pid}) ended with signal SIGKILL"
    else:
        engine.parent().kill()
        message = f"ServiceDied: engines-1 died on {SECOND}"
    output = cluster.ended(f"dying-{killed}", DEADLINE)
    assert message in output and "exit code 1" in output, output
    wait_for(lambda: gone(workers), DEADLINE, "every process of the job has ended")


def test_more_nodes_than_there_are_is_an_error_before_anything_starts(
    cluster: RayCluster, inputs: Path, tmp_path: Path
) -> None:
    nodes = ["--actor-num-nodes", "9"]
    submit(cluster, "many", "train.py", "--hf-checkpoint", f"{inputs}/model", *nodes, *flags(inputs, tmp_path, 1))
    output = cluster.ended("many", DEADLINE)
    assert "--actor-num-nodes must be at most 2, got 9: the Ray cluster has" in output and "exit code 2" in output
    assert not (tmp_path / "logs").exists()
