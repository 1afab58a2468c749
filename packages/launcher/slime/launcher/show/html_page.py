"""The page as one HTML text with its styles and scripts, and in a file also with its data."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from slime.launcher.run_directory.kept_samples import KeptFile
from slime.launcher.show.answers import Answers, ranges, spread
from slime.launcher.show.run_files import RunFiles
from slime.types.directories import path_errors
from slime.types.errors import InvalidFile
from slime.types.files import check_own_file, write_whole

STYLES = ("style.css",)
SCRIPTS = ("data.js", "elements.js", "charts.js", "curves.js", "samples.js", "app.js")
# In a file: most steps and evaluations with samples, most samples of each, and most samples of each with their tokens.
FILE_STEPS = 24
FILE_EVALUATIONS = 8
FILE_SAMPLES = 32
FILE_TOKENS = 8
# Near the beginning of every page.
SIGN = b'<meta name="generator" content="slime show">'
MOST_BYTES = 32 << 20
CHECK_CALLS = 40


def page(title: str, embedded: dict[str, Any] | None = None) -> str:
    """Returns the page as HTML. embedded: answers by request, for a page without a server, and a `note` on what they
    leave out."""
    folder = resources.files(__package__) / "page"
    text = (folder / "index.html").read_text(encoding="utf-8")
    style = "\n".join((folder / name).read_text(encoding="utf-8") for name in STYLES)
    script = "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    connect = "'none'" if embedded else "'self'"
    parts = {
        # The browser executes nothing else, whatever a model wrote.
        "POLICY": f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src {connect}; "
        "img-src data:",
        "STYLE": style,
        "SCRIPT": script,
        "TITLE": _in_html(title),
        "DATA": _in_script(embedded),
    }
    for name, part in parts.items():
        text = text.replace(f"<!--{name}-->", part)
    return text


def write_html(path: Path, answers: Answers) -> int:
    """Writes a file that needs neither server nor network; returns its size in bytes.

    Raises InvalidSetting if `path` cannot be written or holds another file.
    """
    check_own_file(path, SIGN, "page of a run", field="--html")
    text = page(_title(answers.runs), embed(answers))
    with path_errors(path, "--html"):
        write_whole(path, text, field="--html")
    return len(text.encode())


def _title(runs: list[RunFiles]) -> str:
    return ", ".join(run.name for run in runs)


def embed(answers: Answers) -> dict[str, Any]:
    """Returns the answers to the requests that the page makes, for a choice of samples."""
    embedded: dict[str, Any] = {}
    room = MOST_BYTES

    def add(name: str, **query: object) -> Any:
        nonlocal room
        answer = answers.answer(name, {key: str(value) for key, value in query.items()})
        room -= len(json.dumps(answer))
        embedded[request(name, query)] = answer
        return answer

    add("runs")
    add("settings")
    notes = []
    for number, run in enumerate(answers.runs):
        add("curves", run=number)
        add("pairs", run=number)
        for _ in range(CHECK_CALLS):
            checks = add("checks", run=number)
            if checks["checked"] == checks["files"]:
                break
        flagged = {(f["step"], f["eval"]) for f in checks["findings"]}
        chosen = [file for file in run.kept() if file in _choice(run.kept(), flagged)]
        kept: dict[str, list[int]] = {"train": [], "eval": []}
        samples = 0
        for file in chosen:
            if room <= 0:
                break
            kind = "eval" if file.evaluation else "train"
            try:
                answer = add("samples", run=number, step=file.step, kind=kind, start=0)
            except InvalidFile:
                # The checks report that it cannot be read.
                continue
            kept[kind].append(file.step)
            rows = answer["rows"] = answer["rows"][:FILE_SAMPLES]
            samples += len(rows)
            flagged_first = sorted(rows, key=lambda row: not row["findings"])
            for row in flagged_first[:FILE_TOKENS]:
                add("sample", run=number, step=file.step, kind=kind, row=row["row"])
        embedded[request("steps", {"run": number})] = {kind: ranges(steps) for kind, steps in kept.items()}
        total = len(run.kept())
        run_name = f"{run.name}: " if len(answers.runs) > 1 else ""
        notes.append(
            f"{run_name}{samples} samples of {sum(map(len, kept.values()))} of {total} steps and evaluations, "
            f"at most {FILE_SAMPLES} of each, {FILE_TOKENS} of these token by token"
        )
    embedded["note"] = f"This file holds a choice of the samples: {'; '.join(notes)}. `slime show` shows all of them."
    return embedded


def request(name: str, query: Mapping[str, object]) -> str:
    """Returns the key of an answer in a file; `requestKey` in page/data.js makes the same."""
    return f"{name}?" + "&".join(f"{key}={query[key]}" for key in sorted(query))


def _choice(files: list[KeptFile], flagged: set[tuple[int, bool]]) -> set[KeptFile]:
    """Returns some files, evenly spread, those with findings first."""
    chosen: set[KeptFile] = set()
    for evaluation, limit in ((False, FILE_STEPS), (True, FILE_EVALUATIONS)):
        of_kind = [file for file in files if file.evaluation == evaluation]
        found = [file for file in of_kind if (file.step, file.evaluation) in flagged][: limit // 2]
        order = dict.fromkeys([*found, *of_kind[:1], *of_kind[-1:], *spread(of_kind)])
        chosen.update(list(order)[:limit])
    return chosen


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _in_html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _in_script(value: Any) -> str:
    """Encodes JSON that cannot end a script, although text of a model may hold `</script>`."""
    return (
        json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    )
