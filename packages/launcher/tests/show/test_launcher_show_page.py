"""The scripts of a run's page: their logic in Node, and the whole page in a browser, where these are installed."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from launcher_run_files import Row, add_steps, group, make_run

from slime.launcher.run_directory.kept_samples import DIRECTORY, write_file
from slime.launcher.run_directory.state import recorded
from slime.launcher.show.answers import Answers
from slime.launcher.show.command import serve
from slime.launcher.show.html_page import SCRIPTS, request, write_html
from slime.launcher.show.run_files import RunFiles

FOLDER = Path(str(resources.files("slime.launcher.show") / "page"))
NODE = shutil.which("node")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_node = pytest.mark.skipif(NODE is None, reason="Node is not installed")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="needs Chromium and the package playwright",
)


def evaluate(script: str, expression: str) -> Any:
    """The value of an expression in which M is the module of `script`."""
    assert NODE is not None
    code = f"const M = require({json.dumps(str(FOLDER / script))}); console.log(JSON.stringify({expression}))"
    done = subprocess.run([NODE, "-e", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_node
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_parses(script: str) -> None:
    assert NODE is not None
    done = subprocess.run([NODE, "--check", str(FOLDER / script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_texts_of_a_run_are_never_set_as_html() -> None:
    for script in SCRIPTS:
        text = (FOLDER / script).read_text(encoding="utf-8")
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert way not in text, f"{script}: {way}"


@needs_node
def test_the_page_asks_a_file_by_the_keys_that_the_file_has() -> None:
    query = {"step": 3, "run": 0, "kind": "train"}
    assert evaluate("data.js", f"M.requestKey('samples', {json.dumps(query)})") == request("samples", query)
    assert evaluate("data.js", "M.requestKey('runs')") == request("runs", {})


@needs_node
def test_increments_are_joined_and_a_new_edition_starts_over() -> None:
    known = {"steps": [0, 1], "values": {"a": [1, 2]}, "edition": 1, "rows": 2, "whole": True}
    more = {"steps": [2], "values": {"a": [3], "b": [9]}, "edition": 1, "rows": 3, "whole": False}
    joined = evaluate("data.js", f"M.merged({json.dumps(known)}, {json.dumps(more)})")
    assert joined["steps"] == [0, 1, 2] and joined["values"] == {"a": [1, 2, 3], "b": [None, None, 9]}
    assert joined["rows"] == 3
    anew = more | {"edition": 2}
    assert evaluate("data.js", f"M.merged({json.dumps(known)}, {json.dumps(anew)})") == anew


@needs_node
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("M.nearest([[0, 4], [8, 9]], 6)", 4), ("M.nearest([[0, 4], [8, 9]], 7)", 8), ("M.nearest([], 1)", None),
        ("M.neighbour([[0, 4], [8, 9]], 4, 1)", 8), ("M.neighbour([[0, 4], [8, 9]], 9, 1)", None),
        ("M.neighbour([[0, 4], [8, 9]], 8, -1)", 4), ("M.neighbour([[0, 4], [8, 9]], 0, -1)", None),
        ("M.parseAddress('#/samples?run=1&step=2')", {"view": "samples", "query": {"run": "1", "step": "2"}}),
        ("M.parseAddress('')", {"view": "overview", "query": {}}),
        ("M.parseAddress(M.address('checks', {run: 3}))", {"view": "checks", "query": {"run": "3"}}),
    ],
)  # fmt: skip
def test_steps_and_addresses(call: str, expected: Any) -> None:
    assert evaluate("data.js", call) == expected


@needs_node
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("M.ticks(0, 1, 4)", [0, 0.2, 0.4, 0.6, 0.8, 1]), ("M.ticks(0, 240, 5)", [0, 50, 100, 150, 200]),
        ("M.ticks(-0.3, 0.3, 4)", [-0.2, 0, 0.2]), ("M.ticks(2, 2)", [2]),
        ("M.extent([3, null, 1])", [1, 3]), ("M.extent([])", [0, 1]), ("M.extent([5, 6], true)", [0, 6]),
        ("M.smoothed([1, 3, null, 5], 2)", [1, 2, None, 5]),
        ("M.linePath([0, 1, 2, 3], [0, null, 1, 2], (v) => v, (v) => v)", "M0.0 0.0h.1M2.0 1.0L3.0 2.0"),
        ("M.stacked([[1, 2], [3, null]])", [[1, 2], [4, 2]]),
        ("M.indexNear([0, 10, 20], 14)", 1),
    ],
)  # fmt: skip
def test_charts(call: str, expected: Any) -> None:
    assert evaluate("charts.js", call) == expected


@needs_node
def test_the_phases_of_a_step_add_up_to_it() -> None:
    values = {"perf/step_time": [10, 4], "perf/rollout_time": [6, 3], "perf/train_time": [3, None]}
    assert evaluate("curves.js", f"M.phases({json.dumps(values)})") == [
        {"name": "generate", "index": 0, "values": [6, 3]}, {"name": "train", "index": 2, "values": [3, None]},
        {"name": "other", "index": 6, "values": [1, 1]},
    ]  # fmt: skip
    # A run that saves has one phase more, and the others keep their colours.
    saves = evaluate("curves.js", f"M.phases({json.dumps(values | {'perf/save_time': [1, 0]})})")
    assert {each["name"]: each["index"] for each in saves} == {"generate": 0, "train": 2, "save": 3, "other": 6}
    # A run that generates ahead waits less than it generates.
    waits = values | {"perf/rollout_wait_time": [1, 1]}
    assert evaluate("curves.js", f"M.phases({json.dumps(waits)})")[0]["values"] == [1, 1]


@needs_node
def test_the_facts_of_a_token() -> None:
    sample = {"prompt_length": 2, "tokens": [5, 6, 7, 8], "texts": ["a", "b", "c", "d"], "engine_log_probs": [-1, -2],
              "trainer_log_probs": [-1.5, None], "loss_mask": [1, 0], "weight_versions": ["3", None]}  # fmt: skip
    facts = [evaluate("samples.js", f"M.tokenFacts({json.dumps(sample)}, {at})") for at in (1, 2, 3)]
    assert [(f["response"], f["engine"], f["apart"], f["mask"], f["version"]) for f in facts] == [
        (None, None, None, None, None), (0, -1, 0.5, 1, "3"), (1, -2, None, 0, None),
    ]  # fmt: skip


def shift_mask(rows: list[Row]) -> None:
    for row in rows:
        row["loss_mask"] = [0, 1, 1, 1]
        row["response"] = "<img src=x onerror=document.title='bad'>"


def write_kept(run: Path, step: int) -> None:
    (run / DIRECTORY).mkdir(exist_ok=True)
    write_file(run / DIRECTORY / f"{step:06d}.parquet", group(step, step))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright  # pants: no-infer-dep

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser: Any, url: str, width: int = 1200, scheme: str = "light") -> tuple[Any, list[str]]:
    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(url)
    return page, errors


@needs_browser
def test_a_planted_fault_is_found_with_the_keyboard_alone(browser: Any, tmp_path: Path) -> None:
    from playwright.sync_api import expect  # pants: no-infer-dep

    server = serve(Answers([RunFiles(make_run(tmp_path / "run", fault=shift_mask))]))
    try:
        page, errors = opened(browser, server.url)
        page.wait_for_selector("text=Samples before and after")
        page.keyboard.press("6")
        page.wait_for_selector("text=8 found")
        page.focus("a:has-text('step 3, sample 0')")
        page.keyboard.press("Enter")
        page.wait_for_selector(".alert:has-text('the mask does not begin with the response')")
        assert page.locator(".tokens .begin.masked").count() == 1
        page.keyboard.press("j")
        page.wait_for_selector("[data-row='1'][aria-current]")
        page.keyboard.press("]")
        expect(page.get_by_label("Step", exact=True)).to_have_value("4")
        page.focus(".tokens")
        page.keyboard.press("ArrowRight")
        page.wait_for_selector(".detail dd:has-text('1')")
        # A run that goes on shows its new steps by itself.
        add_steps(tmp_path / "run", [6, 7])
        page.keyboard.press("1")
        page.wait_for_selector("dd:has-text('8 of 6')", timeout=60_000)
        assert errors == [] and page.title() != "bad"
    finally:
        server.shutdown()
        server.server_close()


@needs_browser
def test_a_run_that_begins_is_followed_to_its_first_steps_and_samples(browser: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with recorded(run, "train") as state:
        state.phase("starting Ray", num_steps=8)
        server = serve(Answers([RunFiles(run)]))
        try:
            page, errors = opened(browser, server.url)
            page.wait_for_selector(".badge.running")
            page.wait_for_selector("text=no values")
            assert page.locator("text=Seconds of each step").count() == 0
            add_steps(run, range(3))
            write_kept(run, 2)
            page.wait_for_selector("text=Seconds of each step", timeout=60_000)
            page.keyboard.press("3")
            page.wait_for_selector("[data-row='0'][aria-current]")
            write_kept(run, 3)
            page.keyboard.press("]")
            page.wait_for_selector("text=group 3")
            assert errors == []
        finally:
            server.shutdown()
            server.server_close()


@needs_browser
@pytest.mark.parametrize("width", [390, 820, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_file_fits_its_window_and_needs_no_server(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    path = tmp_path / "out.html"
    write_html(path, Answers([RunFiles(make_run(tmp_path / name, fault=shift_mask)) for name in ("one", "two")]))
    page, errors = opened(browser, path.as_uri(), width, scheme)
    for key, words in (("1", "Reward and time"), ("2", "Gradient norm|Loss"), ("3", "Newest"), ("4", "Last evaluation"),
                       ("5", "setting"), ("6", "Loss mask")):  # fmt: skip
        page.keyboard.press(key)
        page.wait_for_selector(f"text=/{words}/")
        assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
    assert errors == [] and page.title() != "bad"
