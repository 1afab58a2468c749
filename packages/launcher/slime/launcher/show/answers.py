"""Answers to the requests of the page: the content of a run's directory, in pieces that a browser can show at once.

A request is a name and parameters, as in "samples?run=0&step=12". The server answers each request as it comes; `--html`
writes the answers to a bounded choice of requests into the file, where the page finds them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from slime.launcher.run_directory.kept_samples import ROW_GROUP, KeptFile, count_rows, iterate_rows, read_rows
from slime.launcher.show.checks import CHECKS, COLUMNS, REGRADED, Rules, SampleFinding, run_checks
from slime.launcher.show.run_files import RunFiles, finite
from slime.launcher.show.token_texts import TokenTexts
from slime.types.errors import InvalidField, InvalidFile

# Most points of a curve; more rows are averaged.
POINTS = 1000
PAGE = 64
MOST_PAGE = 512
SHORT_TEXT = 300
# Rows on each side of a sample that are checked with it; they include its group.
NEIGHBOURS = 32
# Most tokens of one sample that are sent.
MOST_TOKENS = 40_000
# Time in each request for checking further samples, and the samples and tokens that are checked together.
CHECK_SECONDS = 0.3
CHECKED_ROWS = 1024
CHECKED_TOKENS = 4_000_000
# Most findings that are sent, and that are kept of one file.
MOST_FINDINGS = 500
MOST_OF_FILE = 10_000
LIGHT = (
    "step", "dataset", "group_index", "index", "prompt", "response", "label", "reward", "reward_json", "status",
    "response_length", "spans",
)  # fmt: skip

Query = Mapping[str, str]
Number = TypeVar("Number", int, float)


@dataclass
class CheckedFile:
    """The state of the checks of a file of samples. modified: when the file was written. rows: number of rows that are
    checked. whole: all rows are checked."""

    modified: float
    rows: int = 0
    whole: bool = False
    findings: list[SampleFinding] = field(default_factory=list)


class Answers:
    """Answers about some runs, which may still be running. Thread-safe."""

    def __init__(self, runs: Sequence[RunFiles], *, regrade: bool = False) -> None:
        """regrade: grade kept samples again; executes the reward function that a run names."""
        self.runs = list(runs)
        self._regrade = regrade
        self._tokens = [TokenTexts(_model_directories(run)) for run in runs]
        self._checked: list[dict[Path, CheckedFile]] = [{} for _ in runs]
        # Requests come from several threads, and each continues a file's check where the last one ended.
        self._checking = threading.Lock()
        self._calls: dict[str, Callable[[Query], Any]] = {
            "runs": self.overview, "curves": self.curves, "settings": self.settings, "steps": self.steps,
            "samples": self.samples, "sample": self.sample, "checks": self.checks, "pairs": self.pairs,
        }  # fmt: skip

    def answer(self, name: str, query: Query) -> Any:
        """Answers a request with a JSON value. Raises InvalidField for an unknown request or an invalid parameter."""
        if name not in self._calls:
            raise InvalidField("request", name, f"one of {', '.join(self._calls)}")
        return self._calls[name](query)

    def overview(self, query: Query) -> list[dict[str, Any]]:
        """Returns state, progress, scores and errors of every run."""
        return [self._summary(number, run) for number, run in enumerate(self.runs)]

    def _summary(self, number: int, run: RunFiles) -> dict[str, Any]:
        state, (edition, steps) = run.state, run.edition_and_steps()
        return {
            "number": number, "name": run.name, "path": str(run.path), "model": run.model,
            "state": state.state, "phase": state.phase, "error": state.error, "started": run.started(),
            "updated": state.updated, "now": time.time(), "edition": edition, "rows": len(steps),
            "step": steps[-1]["step"] if steps else None,
            "num_steps": state.num_steps or run.settings.get("num_rollout"),
            "reward": run.reward(), "scores": run.scores(), "evaluations": _plain(run.evaluations()[-1:]),
            "kept": len(run.kept()), "logs": run.failures() if state.state == "failed" else [],
        }  # fmt: skip

    def curves(self, query: Query) -> dict[str, Any]:
        """Returns all metrics by step; with `after`, only of later steps, unless a curve would have too many points."""
        run = self._run(query)
        edition, rows = run.edition_and_steps()
        # If steps were averaged, the last one that a page knows lies between two of them.
        after = _number(query, "after", -1.0, least=-1.0)
        whole = len(rows) > POINTS or after < 0 or _number(query, "edition", edition) != edition
        chosen = rows if whole else [row for row in rows if row["step"] > after]
        keys = sorted({key for row in chosen for key in row} - {"step"})
        values = {key: [finite(row.get(key)) for row in chosen] for key in keys}
        steps = [float(row["step"]) for row in chosen]
        if len(chosen) > POINTS:
            steps, values = _thinned(steps, values)
        values = {key: [_rounded(value) for value in column] for key, column in values.items()}
        return {
            "whole": whole, "edition": edition, "rows": len(rows), "steps": steps, "values": values,
            "averaged": len(chosen) > POINTS,
        }  # fmt: skip

    def settings(self, query: Query) -> list[dict[str, Any]]:
        """Returns every setting with its value in each run; `given`: a user gave it to one of them."""
        names = sorted({name for run in self.runs for name in run.settings})
        rows = []
        for name in names:
            values = [run.settings.get(name) for run in self.runs]
            texts = [None if value is None else str(value) for value in values]
            rows.append({
                "name": name, "values": texts, "given": any(name in run.explicit for run in self.runs),
                "differs": len(set(texts)) > 1,
            })  # fmt: skip
        return rows

    def steps(self, query: Query) -> dict[str, Any]:
        """Returns the steps and evaluations that have samples, as ranges [first, last]."""
        files = self._run(query).kept()
        return {
            "train": ranges([file.step for file in files if not file.evaluation]),
            "eval": ranges([file.step for file in files if file.evaluation]),
        }

    def samples(self, query: Query) -> dict[str, Any]:
        """Returns a page of the samples of a step: short texts, rewards, findings."""
        file = self._file(query)
        start, count = _number(query, "start", 0), min(_number(query, "count", PAGE), MOST_PAGE)
        rows = read_rows(file.path, LIGHT, start=start, stop=start + count)
        findings: dict[int, list[str]] = {}
        for finding in self._page_findings(_number(query, "run", 0), file, start, start + count):
            findings.setdefault(finding.row, []).append(finding.check)
        return {
            "start": start, "total": count_rows(file.path),
            "rows": [_light(start + i, row, findings.get(start + i, [])) for i, row in enumerate(rows)],
        }  # fmt: skip

    def sample(self, query: Query) -> dict[str, Any]:
        """Returns one sample with every token."""
        number, file, at = _number(query, "run", 0), self._file(query), _number(query, "row", 0)
        rows = read_rows(file.path, start=at, stop=at + 1)
        if not rows:
            raise InvalidField("row", at, f"less than {count_rows(file.path)}")
        row = rows[0]
        tokens = row.pop("tokens") or []
        # A broken file may state any length.
        response, num_sent = min(max(row["response_length"] or 0, 0), len(tokens)), min(len(tokens), MOST_TOKENS)
        versions: list[str | None] = [None] * response
        for span in row.pop("spans") or ():
            for i in range(max(span["start"], 0), min(span["end"], response)):
                versions[i] = span["weight_version"]
        return row | {
            "row": at, "reward": finite(row["reward"]), "tokens": tokens[:num_sent], "num_tokens": len(tokens),
            "texts": self._tokens[number].of(tokens[:num_sent]), "prompt_length": len(tokens) - response,
            "engine_log_probs": _numbers(row["engine_log_probs"]), "weight_versions": versions,
            "trainer_log_probs": _numbers(row["trainer_log_probs"]),
            "findings": [
                f.as_dict()
                for f in self._page_findings(number, file, max(0, at - NEIGHBOURS), at + NEIGHBOURS)
                if f.row == at
            ],
        }  # fmt: skip

    def checks(self, query: Query) -> dict[str, Any]:
        """Returns the checks and their findings so far; every call checks further samples for a moment."""
        number, run = _number(query, "run", 0), self._run(query)
        files = run.kept()
        done = self._checked[number]
        until = time.monotonic() + CHECK_SECONDS
        # The newest file first, then the files farthest from those that are checked.
        for file in [*files[-1:], *spread(files)]:
            is_new = file.path not in done or not done[file.path].whole
            if is_new or file is files[-1]:
                self._check(number, file, until)
            # Each call checks at least one part, so that the checks come to an end.
            if is_new and time.monotonic() > until:
                break
        findings = [
            {"step": file.step, "eval": file.evaluation, **finding.as_dict()}
            for file in files
            if file.path in done
            for finding in done[file.path].findings
        ]
        listed = [*CHECKS, *([(*REGRADED, None)] if self._regrade else [])]
        return {
            "files": len(files), "checked": sum(file.path in done and done[file.path].whole for file in files),
            "findings": findings[:MOST_FINDINGS],
            "checks": [
                {"check": key, "title": title, "meaning": meaning, "count": sum(f["check"] == key for f in findings)}
                for key, title, meaning, _ in listed
            ],
        }  # fmt: skip

    def pairs(self, query: Query) -> dict[str, Any]:
        """Returns samples before and after training: of the first and last evaluation, or the first and last step."""
        files = self._run(query).kept()
        chosen = [file for file in files if file.evaluation] or files
        if len(chosen) < 2:
            return {"before": None, "after": None, "pairs": []}
        first, last = chosen[0], chosen[-1]
        try:
            old, new = (
                [_light(i, r, []) for i, r in enumerate(read_rows(f.path, LIGHT, stop=PAGE))] for f in (first, last)
            )
        except InvalidFile:
            # The checks report which file cannot be read.
            return {"before": None, "after": None, "pairs": []}
        by_prompt = {(row["dataset"], row["prompt"]): row for row in reversed(new)}
        pairs = [[row, by_prompt.get((row["dataset"], row["prompt"]))] for row in old]
        if not first.evaluation:
            pairs = [list(pair) for pair in zip(old, new, strict=False)]
        return {"before": first.step, "after": last.step, "eval": first.evaluation, "pairs": pairs}

    def _check(self, number: int, file: KeptFile, until: float = math.inf) -> list[SampleFinding]:
        """Checks a file to its end or until a time (monotonic seconds); returns its findings.

        A resumed run may write the file again.
        """
        with self._checking:
            return self._check_alone(number, file, until)

    def _check_alone(self, number: int, file: KeptFile, until: float) -> list[SampleFinding]:
        done = self._checked[number]
        try:
            modified = file.path.stat().st_mtime
        except OSError:
            # A run that resumes removes the samples of the steps that it repeats.
            return []
        if file.path not in done or done[file.path].modified != modified:
            done[file.path] = CheckedFile(modified)
        checked = done[file.path]
        while not checked.whole:
            self._check_on(number, file, checked)
            if time.monotonic() > until:
                break
        return checked.findings

    def _check_on(self, number: int, file: KeptFile, checked: CheckedFile) -> None:
        """Checks the next samples of a file."""
        rows: list[dict[str, Any]] = []
        tokens = 0
        try:
            for row in iterate_rows(file.path, COLUMNS, start=checked.rows, arrays=True):
                rows.append(row)
                tokens += 0 if row["tokens"] is None else len(row["tokens"])
                if len(rows) >= CHECKED_ROWS or tokens > CHECKED_TOKENS:
                    break
            else:
                checked.whole = True
        except InvalidFile as error:
            rows, checked.whole = [], True
            checked.findings.append(SampleFinding("numbers", checked.rows, str(error)))
        found = self._findings(self.runs[number], rows)
        room = max(0, MOST_OF_FILE - len(checked.findings))
        checked.findings += [replace(finding, row=finding.row + checked.rows) for finding in found[:room]]
        checked.rows += len(rows)

    def _page_findings(self, number: int, file: KeptFile, start: int, stop: int) -> list[SampleFinding]:
        """Returns the findings of some rows. In a large file that is not checked yet, only these rows are checked."""
        done = self._checked[number].get(file.path)
        if (done is not None and done.whole) or count_rows(file.path) <= ROW_GROUP:
            return self._check(number, file)
        found = self._findings(
            self.runs[number], list(iterate_rows(file.path, COLUMNS, start=start, stop=stop, arrays=True))
        )
        return [replace(finding, row=finding.row + start) for finding in found]

    def _findings(self, run: RunFiles, rows: list[dict[str, Any]]) -> list[SampleFinding]:
        found = run_checks(rows, Rules.of(run.settings, asynchronous=run.asynchronous))
        if self._regrade:
            from slime.launcher.show.regrade import regrade

            found += regrade(rows, run.settings)
        # A row's number says where it lies in its file, and the index is what the samples view and the texts name.
        return [replace(finding, index=rows[finding.row]["index"]) for finding in found]

    def _run(self, query: Query) -> RunFiles:
        number = _number(query, "run", 0)
        if not 0 <= number < len(self.runs):
            raise InvalidField("run", number, f"less than {len(self.runs)}")
        return self.runs[number]

    def _file(self, query: Query) -> KeptFile:
        run, step, evaluation = self._run(query), _number(query, "step", 0), query.get("kind") == "eval"
        file = run.kept_at(step, evaluation=evaluation)
        if file is not None:
            return file
        raise InvalidField("step", step, "a step of which samples were kept")


def spread(files: Sequence[KeptFile]) -> list[KeptFile]:
    """Orders files: both ends first, then the middles of the gaps, so that every beginning is spread evenly."""
    order: list[int] = []
    stride = 1 << max(0, len(files) - 1).bit_length()
    seen: set[int] = set()
    while stride:
        order += [n for n in range(0, len(files), stride) if n not in seen]
        seen.update(order)
        stride //= 2
    return [files[n] for n in order]


def ranges(steps: Sequence[int]) -> list[list[int]]:
    """Returns ascending steps as ranges [first, last]."""
    step_ranges: list[list[int]] = []
    for step in steps:
        if step_ranges and step == step_ranges[-1][1] + 1:
            step_ranges[-1][1] = step
        else:
            step_ranges.append([step, step])
    return step_ranges


def _thinned(
    steps: list[float], values: dict[str, list[float | None]]
) -> tuple[list[float], dict[str, list[float | None]]]:
    """Returns `POINTS` means, each over neighbouring rows."""
    edges = np.linspace(0, len(steps), POINTS + 1).astype(int)[:-1]
    counts = np.diff([*edges, len(steps)])
    thinned: dict[str, list[float | None]] = {}
    for key, column in values.items():
        array = np.array([np.nan if value is None else value for value in column], np.float64)
        known = np.isfinite(array)
        sums, number = np.add.reduceat(np.where(known, array, 0.0), edges), np.add.reduceat(known, edges, dtype=int)
        thinned[key] = [float(s / n) if n else None for s, n in zip(sums, number, strict=True)]
    return list(np.add.reduceat(np.array(steps), edges) / counts), thinned


def _rounded(value: float | None) -> float | None:
    """Rounds to six digits, more than a curve shows: half the size of all digits."""
    return None if value is None else float(f"{value:.6g}")


def _light(number: int, row: dict[str, Any], findings: list[str]) -> dict[str, Any]:
    versions = sorted({span["weight_version"] for span in row.pop("spans") or ()})
    return row | {
        "row": number, "findings": findings, "versions": versions, "reward": finite(row["reward"]),
        "prompt": _short(row["prompt"]), "response": _short(row["response"]), "label": _short(row["label"] or ""),
    }  # fmt: skip


def _short(text: str) -> str:
    return text if len(text) <= SHORT_TEXT else f"{text[: SHORT_TEXT // 2]} … {text[-SHORT_TEXT // 2 :]}"


def _numbers(values: list[float] | None) -> list[float | None] | None:
    return None if values is None else [None if (v := finite(value)) is None else round(v, 5) for value in values]


def _plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value if key == "step" else finite(value) for key, value in row.items()} for row in rows]


def _number(query: Query, name: str, default: Number, least: float = 0) -> Number:
    """Returns a parameter as a number of the type of `default`."""
    text = query.get(name)
    if text is None:
        return default
    try:
        value = type(default)(text)
    except ValueError:
        raise InvalidField(name, text, "an integer" if isinstance(default, int) else "a number") from None
    if not value >= least:
        raise InvalidField(name, text, f"at least {least:g}")
    return value


def _model_directories(run: RunFiles) -> list[Path]:
    model = run.settings.get("hf_checkpoint")
    return [run.path / "model", *([Path(str(model))] if model else [])]
