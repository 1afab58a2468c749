"""The files of deploy/: their form, and a dry run of the commands in them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer, models

from slime.converters.megatron.model_scripts import model_config
from slime.launcher import cli

NUM_GPUS = 0

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory with the model and the prompts that the files name."""
    model = tmp_path / "models" / "Qwen3-4B"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(model_config("qwen3-4B")))
    (model / "tokenizer.json").write_text(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str())
    template = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "a", "chat_template": "{{ messages }}"}
    (model / "tokenizer_config.json").write_text(json.dumps(template))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "prompts.jsonl").write_text('{"prompt": "1 + 1?", "label": "2"}\n' * 2)
    return tmp_path


def plan(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Returns the dry run of `slime train ...` on nodes of 8 GPUs."""
    assert command[:2] == ["slime", "train"]
    code = cli.main([*command[1:], "--dry-run", "--dry-run-gpus", "8"])
    output = capsys.readouterr()
    assert code == 0, output.err
    return output.out


def test_the_ray_job_describes_the_cluster_that_its_command_needs(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job: dict[str, Any] = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    # A run joins only a Ray that asks for a token.
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    groups = [(1, cluster["headGroupSpec"]), *((each["replicas"], each) for each in cluster["workerGroupSpecs"])]
    gpus = []
    for replicas, group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/shared", "/dev/shm"}
        assert volumes["memory"]["emptyDir"]["medium"] == "Memory"
        assert group["rayStartParams"]["num-gpus"] == container["resources"]["limits"]["nvidia.com/gpu"]
        gpus += [int(group["rayStartParams"]["num-gpus"])] * replicas

    command = shlex.split(job["spec"]["entrypoint"].replace("/shared", str(shared)))
    assert gpus == [int(value(command, "--actor-num-gpus-per-node"))] * int(value(command, "--actor-num-nodes"))
    plan(command, capsys)


def value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


# Programs of Slurm and Ray: `srun` runs what it is given, here, and the others say what a cluster of two nodes would.
# The cluster is there once both nodes are: a run that ended earlier would take a node with it that had yet to start.
PROGRAMS = {
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "scontrol": "printf 'node1\\nnode2\\n'",
    "hostname": "echo 10.0.0.1",
    "ray": """[ "$1" = status ] && exec test "$(grep -c '^ray start' "$RECORD")" = 2
echo "ray $*" >> "$RECORD"; exec sleep 60""",
    "slime": 'printf "%s\\n" slime "$@" > "$RECORD.run"',
}


def test_the_slurm_script_starts_a_node_each_and_then_the_run(
    shared: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    bin_dir = tmp_path_factory.mktemp("bin")
    for name, text in PROGRAMS.items():
        (bin_dir / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (bin_dir / name).chmod(0o755)
    record = bin_dir / "record"
    environment = os.environ | {
        "PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}", "RECORD": str(record), "SLIME_SHARED": str(shared),
        "SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_GPUS_ON_NODE": "8",
    }  # fmt: skip
    script = DEPLOY / "slurm.sh"
    subprocess.run(["bash", script, "--num-rollout", "3"], env=environment, check=True, timeout=60, capture_output=True)

    started = [line for line in record.read_text().splitlines() if line.startswith("ray start")]
    assert len(started) == 2 and "--head --node-ip-address 10.0.0.1 --port 32345" in "".join(started)
    assert "--address 10.0.0.1:32345" in "".join(started)
    command = (bin_dir / "record.run").read_text().splitlines()
    assert command[-2:] == ["--num-rollout", "3"] and value(command, "--ray-address") == "10.0.0.1:32345"
    assert value(command, "--actor-num-nodes") == "2"
    where = command.index("--ray-address")
    plan([*command[:where], *command[where + 2 :]], capsys)


def test_the_images_are_built_from_files_that_are_there() -> None:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    stages = re.findall(r"^FROM \S+ AS (\S+)$", text, re.M)
    assert set(re.findall(r"--target (\S+)", text)) < set(stages)
    assert set(re.findall(r"--mount=from=(\w+)", text)) <= set(stages)
    for source in re.findall(r"^COPY (\S+) ", text, re.M):
        assert (ROOT / source).exists()
        assert f"!{source}" in (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    for stage in re.split(r"^FROM ", text, flags=re.M)[2:]:
        # Nothing of a run needs root.
        assert "\nUSER slime\n" in stage and 'ENTRYPOINT ["slime"]' in stage
        # By their names, the index could give others of higher versions.
        assert "/wheels/*.whl" in stage and not re.search(r"pip install [^&\n]*\bslime-", stage)
    assert ":latest" not in text
