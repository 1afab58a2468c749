"""The commands `slime show`, `slime runs` and `slime compare`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from slime.launcher.config.help import CommandParser
from slime.launcher.metrics.printable import printable
from slime.launcher.show.run_files import RunFiles, find_runs, names
from slime.types.errors import InvalidField, InvalidSetting, SlimeError
from slime.types.settings import Parser

if TYPE_CHECKING:
    from slime.launcher.show.answers import Answers
    from slime.launcher.show.server import PageServer


def main(command: str, argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 2 wrong arguments."""
    try:
        options = parser(command).parse_strict(argv)
        if command == "runs":
            return _runs(options)
        runs = _opened(options.run)
        return _compare(options, runs) if command == "compare" else _show(options, runs)
    except SlimeError as error:
        print(printable(f"slime: error: {error}"), file=sys.stderr)
        return 2


def parser(command: str) -> Parser:
    about = {
        "show": "Opens a page on one or more runs in the browser: curves, samples token by token, evaluation, settings "
        "and errors. The page updates itself while a run goes on; Ctrl-C ends the command.",
        "runs": "Lists the runs below a directory with their state, iterations, reward, scores, age and model.",
        "compare": "Prints the settings in which runs differ, and their metrics and scores side by side.",
    }
    reader = CommandParser(prog=f"slime {command}", description=about[command], formatter_class=argparse.HelpFormatter)
    if command == "runs":
        reader.add_argument(
            "dir", nargs="?", default="runs", metavar="DIR", help="Directory to look in (default: runs)"
        )
    elif command == "compare":
        reader.add_argument("run", nargs="+", metavar="RUN", help="Output directory of a run; at least two")
    else:
        reader.add_argument("run", nargs="+", metavar="RUN", help="Output directory of a run")
    if command == "show":
        reader.add_argument("--html", metavar="FILE", help="Write the page into a file that needs no server, and exit")
        reader.add_argument("--text", action="store_true", help="Print the run in the terminal, and exit")
        reader.add_argument(
            "--step", type=int, metavar="N", help="With --text: iteration whose samples are printed (default: the last)"
        )
        reader.add_argument("--port", type=int, metavar="N", help="Port on the loopback (default: a free one)")
        reader.add_argument("--no-browser", action="store_true", help="Only print the address")
        reader.add_argument(
            "--regrade", action="store_true",
            help="Grade the kept samples again and list rewards that differ; executes the run's reward function",
        )  # fmt: skip
    else:
        reader.add_argument("--json", action="store_true", help="Print JSON for programs")
    return reader


def _opened(words: Sequence[str]) -> list[RunFiles]:
    paths = [Path(word) for word in words]
    return [RunFiles(path, name) for path, name in zip(paths, names(paths), strict=True)]


def _runs(options: argparse.Namespace) -> int:
    from slime.launcher.show.listing import described, listing

    paths = find_runs(Path(options.dir))
    rows = [described(RunFiles(path, name)) for path, name in zip(paths, names(paths), strict=True)]
    rows.sort(key=lambda row: row["started"] or 0.0, reverse=True)
    if options.json:
        print(json.dumps(rows, indent=2, default=str))
    elif not rows:
        print(printable(f"no runs below {options.dir}"))
    else:
        _console().print(listing(rows))
    return 0


def _compare(options: argparse.Namespace, runs: Sequence[RunFiles]) -> int:
    from slime.launcher.show.listing import compared, comparison

    if len(runs) < 2:
        raise InvalidSetting.must_be("RUN", "at least two runs", got=len(runs))
    found = compared(runs)
    if options.json:
        print(json.dumps(found, indent=2, default=str))
        return 0
    console = _console()
    for table in comparison(found):
        console.print(table)
        console.print()
    return 0


def _show(options: argparse.Namespace, runs: Sequence[RunFiles]) -> int:
    from slime.launcher.show.answers import Answers

    if options.text and options.html is not None:
        raise InvalidSetting.conflict("--text", f"--html {options.html}", "one prints the run, the other writes a file")
    if options.step is not None and not options.text:
        raise InvalidSetting.requires(f"--step {options.step}", "--text")
    page = {f"--port {options.port}": options.port is not None, "--no-browser": options.no_browser}
    elsewhere = "--text" if options.text else "--html" if options.html is not None else ""
    for flag in (flag for flag, given in page.items() if given and elsewhere):
        raise InvalidSetting.conflict(elsewhere, flag, f"with {elsewhere} no page is served")
    answers = Answers(runs, regrade=options.regrade)
    if options.text:
        from slime.launcher.show.text import text

        for number in range(len(runs)):
            try:
                lines = list(text(answers, number, options.step))
            except InvalidField as error:
                if error.field != "step":
                    raise
                raise InvalidSetting.must_be("--step", str(error.expected), got=options.step) from None
            for line in lines:
                print(printable(line))
        return 0
    if options.html is not None:
        from slime.launcher.show.html_page import write_html

        size = write_html(Path(options.html), answers)
        print(printable(f"wrote {options.html}, {size / 1e6:.1f} MB"))
        return 0
    server = serve(answers, options.port or 0)
    port = server.server_port
    print(f"{server.url}\nCtrl-C ends it. From another machine: ssh -L {port}:127.0.0.1:{port} HOST")
    if not options.no_browser and _has_display():
        webbrowser.open(server.url_once())
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print()
    finally:
        server.shutdown()
        server.server_close()
    return 0


def serve(answers: Answers, port: int = 0) -> PageServer:
    """Serves the page in threads until `shutdown`. Raises InvalidSetting if the port is taken."""
    from slime.launcher.show.html_page import page
    from slime.launcher.show.server import PageServer

    if not 0 <= port <= 65535:
        raise InvalidSetting.must_be("--port", "from 0 to 65535", got=port)
    try:
        server = PageServer(page(", ".join(run.name for run in answers.runs)), answers.answer, port)
    except OSError as error:
        raise InvalidSetting(
            f"--port {port}: cannot listen on 127.0.0.1: {error.strerror}; leave --port out for a free one",
            field="--port", value=port, expected="a free port, or 0",
        ) from None  # fmt: skip
    threading.Thread(target=server.serve_forever, name="page", daemon=True).start()
    return server


@contextmanager
def watched(directory: Path, wanted: bool) -> Iterator[None]:
    """Serves the page of a run during the block and prints its address, if `wanted`."""
    if not wanted:
        yield
        return
    from slime.launcher.show.answers import Answers

    server = serve(Answers([RunFiles(directory)]))
    print(f"page of this run: {server.url}", flush=True)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # rich would end the process with exit code 1, as for an error.
        raise BrokenPipeError


def _console() -> Console:
    # A pipe gets whole lines. Brackets in names and settings are not markup.
    return _Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)


def _has_display() -> bool:
    """Returns whether there is a display: without one, a text browser would take over the terminal."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
