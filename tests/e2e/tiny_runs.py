"""Runs the tiny quickstart as a user does, in a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from slime.launcher.metrics.files import is_evaluation, read_metrics

# Far beyond what a run takes: a deadline ends what hangs, and must not end what a busy machine makes slow.
DEADLINE = 600.0
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


def quickstart(output_dir: Path, *flags: str, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "slime.launcher.quickstart", "--tiny", "--output-dir", str(output_dir), *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def finish(process: subprocess.Popen[str], seconds: float = DEADLINE) -> str:
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return output


def run(output_dir: Path, *flags: str) -> str:
    process = quickstart(output_dir, *flags)
    output = finish(process)
    assert process.returncode == 0, output
    return output


def metrics(output_dir: Path) -> list[dict]:
    """The rows of the steps."""
    return [row for row in read_metrics(output_dir / "metrics.jsonl") if not is_evaluation(row)]


def evaluations(output_dir: Path) -> list[dict]:
    return [row for row in read_metrics(output_dir / "metrics.jsonl") if is_evaluation(row)]


def timeless(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def trained_a_step(output_dir: Path) -> bool:
    path = output_dir / "metrics.jsonl"
    return path.exists() and '"perf/step_time"' in path.read_text()


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def command_line(process: psutil.Process) -> str:
    """The words of its command; "" where it has ended since it was listed."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def services(processes: Iterable[psutil.Process], log: Path) -> list[psutil.Process]:
    """Returns the processes of Ray that write this log."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith("ray::") and str(log) in [file.path for file in process.open_files()]:
                found.append(process)
    return found


def processes_with(variables: Mapping[str, str]) -> list[psutil.Process]:
    """Returns the processes that inherited these environment variables, whoever their parent is now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if variables.items() <= process.environ().items():
                found.append(process)
    return found


def gone(processes: list[psutil.Process]) -> bool:
    return not any(alive(p) for p in processes)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_the_end_of(killed: list[psutil.Process]) -> None:
    """Waits for the end of what a killed launcher started. Kills Ray's agents, which would try to reach its GCS for a
    minute."""
    agents = [process for process in killed if command_line(process).startswith(RAY_AGENTS)]
    wait_for(lambda: gone([p for p in killed if p not in agents]), DEADLINE, "every process has ended")
    for agent in agents:
        with contextlib.suppress(psutil.NoSuchProcess):
            agent.kill()
    wait_for(lambda: gone(agents), DEADLINE, "Ray's agents have ended")


def write_inputs(directory: Path) -> Path:
    """Makes the tiny model and its data, for `command`."""
    from slime.launcher.quickstart import reverse

    reverse.write_data(directory, 0)
    reverse.write_model(directory / "model", 0)
    return directory


def command(
    name: str,
    inputs: Path,
    output_dir: Path,
    *flags: str,
    program: Sequence[str] = ("-m", "slime.launcher.cli"),
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """`slime NAME` on them, with as few flags as it takes; rollouts of eight groups of four.

    program: what Python runs.
    """
    words = [
        "--hf-checkpoint", inputs / "model", "--prompt-data", inputs / "train.jsonl", "--input-key", "prompt",
        "--label-key", "label", "--custom-rm-path", "slime.launcher.quickstart.reverse.reward",
        "--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "5", "--lr", "1e-3",
        "--rollout-engine", "embedded", "--output-dir", output_dir,
    ]  # fmt: skip
    line = [sys.executable, *program, name, *map(str, words), *flags]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def run_command(name: str, inputs: Path, output_dir: Path, *flags: str) -> str:
    process = command(name, inputs, output_dir, *flags)
    output = finish(process)
    assert process.returncode == 0, output
    return output
