"""A run in the terminal, for users without a browser: its state, the findings of the checks, and samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime.launcher.show.answers import Answers
from slime.launcher.show.listing import described, shown
from slime.launcher.show.run_files import RunFiles
from slime.types.errors import InvalidFile

SAMPLES = 8
BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH = 60
# Calls that check further files, each for a moment.
CHECK_CALLS = 40


def text(answers: Answers, number: int, step: int | None) -> Iterator[str]:
    """Yields lines about one run. step: the step whose samples to show; None for the last one."""
    run = answers.runs[number]
    row = described(run)
    total = f" of {row['num_steps']}" if row["num_steps"] else ""
    yield f"{row['name']}: {row['state']}, {row['steps']}{total} steps, reward {shown(row['reward'])}, {row['model']}"
    if row["state"] == "running":
        yield f"now: {row['phase']}"
    if row["error"]:
        yield f"error: {row['error']}"
        yield from (f"  {log['log']}: {line}" for log in run.failures() for line in log["lines"])
    yield from _curves(answers, number, run)
    yield ""
    yield from _checks(answers, number)
    yield ""
    yield from _samples(answers, number, step)


def _curves(answers: Answers, number: int, run: RunFiles) -> Iterator[str]:
    values = answers.curves({"run": str(number)})["values"].get("rollout/raw_reward", [])
    known = [value for value in values if value is not None]
    if known:
        yield f"reward      {sparkline(known)}  {shown(known[0])} to {shown(known[-1])}"
    for name, points in run.scores().items():
        yield f"{name:<11} " + ", ".join(f"{shown(score)} after {step}" for step, score in points[-6:])


def _checks(answers: Answers, number: int) -> Iterator[str]:
    query = {"run": str(number)}
    for _ in range(CHECK_CALLS):
        answer = answers.checks(query)
        if answer["checked"] == answer["files"]:
            break
    yield f"checks of {answer['checked']} of {answer['files']} steps and evaluations with samples:"
    for check in answer["checks"]:
        yield f"  {check['title']:<15} {check['count'] or 'nothing'} found"
        for finding in [f for f in answer["findings"] if f["check"] == check["check"]][:3]:
            kind = "evaluation after step" if finding["eval"] else "step"
            sample = "a row" if finding["index"] is None else f"sample {finding['index']}"
            yield f"    {kind} {finding['step']}, {sample}: {finding['text']}"


def _samples(answers: Answers, number: int, step: int | None) -> Iterator[str]:
    files = [file for file in answers.runs[number].kept() if not file.evaluation]
    if not files:
        yield "this run has kept no samples: --log-samples N keeps those of N groups per step"
        return
    wanted = files[-1].step if step is None else step
    try:
        found = answers.samples({"run": str(number), "step": str(wanted), "count": str(SAMPLES)})
    except InvalidFile as error:
        if step is not None:
            raise
        yield f"step {wanted}: {error}"  # nobody asked for it, and the lines above are worth seeing
        return
    yield f"step {wanted}, {min(SAMPLES, found['total'])} of {found['total']} samples:"
    prompt: Any = None
    for row in found["rows"]:
        if row["prompt"] != prompt:
            prompt = row["prompt"]
            yield f"  {prompt!r}   (label {row['label']!r})"
        flags = f"   [{', '.join(row['findings'])}]" if row["findings"] else ""
        yield f"    {shown(row['reward']):>7}  {row['response']!r}{flags}"


def sparkline(values: list[float]) -> str:
    """Draws up to `WIDTH` blocks, each the mean of neighbouring values, between the lowest and the highest."""
    width = min(WIDTH, len(values))
    parts = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    size = high - low or 1.0
    return "".join(BLOCKS[1 + round((mean - low) / size * (len(BLOCKS) - 2))] for mean in means)
