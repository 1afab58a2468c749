"""The server of a run's page: who gets in, what it answers, and the file without a server."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from launcher_run_files import Row, add_steps, make_run

from slime.launcher.show.answers import Answers
from slime.launcher.show.command import serve, watched
from slime.launcher.show.html_page import embed, page, request, write_html
from slime.launcher.show.run_files import RunFiles
from slime.launcher.show.server import PageServer
from slime.types.errors import InvalidSetting

HOSTILE = "</script><script>alert(1)</script><!--DATA--><img src=x onerror=alert(2)>\u2028"


def hostile(rows: list[Row]) -> None:
    for row in rows:
        row["response"] = row["prompt"] = HOSTILE


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    server = serve(Answers([RunFiles(make_run(tmp_path / "run", fault=hostile))]))
    yield server
    server.shutdown()
    server.server_close()


def get(server: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)) as connection:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response, response.read()


def data(server: PageServer, request: str) -> Any:
    response, body = get(server, f"/{server.word}/data/{request}")
    assert response.status == 200, body
    return json.loads(body)


def test_the_page_and_its_data_are_served_to_whoever_has_the_address(server: PageServer) -> None:
    response, body = get(server, f"/{server.word}/")
    assert response.status == 200 and b"<main" in body and HOSTILE.encode() not in body
    assert "frame-ancestors 'none'" in str(response.getheader("Content-Security-Policy"))
    assert [run["state"] for run in data(server, "runs")] == ["unknown"]
    sample = data(server, "sample?run=0&kind=train&step=3&row=2")
    assert sample["response"] == HOSTILE and sample["loss_mask"] == [1, 1, 1, 1]


def test_the_page_follows_a_run_that_goes_on(server: PageServer, tmp_path: Path) -> None:
    first = data(server, "curves?run=0")
    add_steps(tmp_path / "run", [6, 7])
    more = data(server, f"curves?run=0&after=5&edition={first['edition']}")
    assert more["steps"] == [6, 7] and not more["whole"]
    assert data(server, "runs")[0]["step"] == 7


def test_the_server_listens_on_the_loopback_only(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:{port}"}, 403),
        ({"Host": "127.0.0.1"}, 403),
        ({"Host": "localhost:{port}"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "http://127.0.0.1:{port}"}, 200),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Sec_Fetch_Site": "same-origin"}, 200),
    ],
)
def test_other_sites_get_nothing(server: PageServer, headers: dict[str, str], status: int) -> None:
    port = str(server.server_port)
    response, body = get(
        server, f"/{server.word}/data/runs", **{k: v.replace("{port}", port) for k, v in headers.items()}
    )
    assert response.status == status and (status == 200 or b"run" not in body.replace(b"server", b""))


@pytest.mark.parametrize("path", ["/", "/data/runs", "/x/data/runs", "//data/runs", "/%2e%2e/data/runs"])
def test_without_the_word_there_is_nothing(server: PageServer, path: str) -> None:
    response, body = get(server, path)
    assert response.status == 404 and b"slime show" in body


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ("passwords", 400), ("../run.yaml", 400), ("curves?run=7", 400), ("samples?step=99", 400),
        ("sample?step=x", 400), ("%2e%2e/%2e%2e/etc/passwd", 400),
    ],
)  # fmt: skip
def test_a_request_that_there_is_not_is_refused_by_name(server: PageServer, request_: str, status: int) -> None:
    response, body = get(server, f"/{server.word}/data/{request_}")
    assert response.status == status and json.loads(body)["error"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_only_get_is_answered(server: PageServer, method: str) -> None:
    assert get(server, f"/{server.word}/data/runs", method)[0].status == 501


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidSetting, match=f"--port {port}"):
            serve(Answers([RunFiles(make_run(tmp_path / "run"))]), port)


def test_a_run_that_is_watched_serves_its_page_until_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    with watched(run, wanted=True):
        url = re.search(r"http://127\.0\.0\.1:(\d+)/(\S+)/", capsys.readouterr().out)
        assert url is not None
        with closing(http.client.HTTPConnection("127.0.0.1", int(url[1]), timeout=30)) as connection:
            connection.request("GET", f"/{url[2]}/data/runs")
            assert json.loads(connection.getresponse().read())[0]["name"] == "run"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(url[1])), timeout=60)
    with watched(run, wanted=False):
        assert capsys.readouterr().out == ""


def parts_of(text: str) -> tuple[str, str, str, Any]:
    """The policy, the styles, the script and the data of a page."""
    found = re.fullmatch(
        r'.*http-equiv="Content-Security-Policy" content="([^"]*)".*<style>(.*)</style>.*'
        r'<script type="application/json" id="embedded">(.*?)</script>\s*<script>(.*)</script>\s*</body>\s*</html>\s*',
        text, re.DOTALL,
    )  # fmt: skip
    assert found is not None
    return found[1], found[2], found[4], json.loads(found[3])


def test_a_file_holds_everything_that_the_page_asks_for_and_talks_to_nobody(tmp_path: Path) -> None:
    runs = [RunFiles(make_run(tmp_path / name, fault=hostile)) for name in ("one", "two")]
    path = tmp_path / "out.html"
    size = write_html(path, Answers(runs))
    text = path.read_text(encoding="utf-8")
    assert size == path.stat().st_size < 2**20
    policy, style, script, embedded = parts_of(text)
    for source, code in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert f"{source} 'sha256-{digest}'" in policy
    assert "connect-src 'none'" in policy and "default-src 'none'" in policy
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text)
    for number in (0, 1):
        for name in ("curves", "pairs", "checks", "steps"):
            assert f"{name}?run={number}" in embedded
        for step in range(6):
            rows = embedded[request("samples", {"run": number, "step": step, "kind": "train", "start": 0})]["rows"]
            assert len(rows) == 8
            for row in rows:
                key = request("sample", {"run": number, "step": step, "kind": "train", "row": row["row"]})
                assert embedded[key]["index"] == row["index"]
        assert embedded[f"steps?run={number}"]["eval"] == [[0, 0], [6, 6]]
    sample = embedded[request("sample", {"run": 1, "step": 3, "kind": "train", "row": 0})]
    assert sample["response"] == HOSTILE
    assert "at most 32 of each" in embedded["note"]


def test_a_file_of_a_long_run_holds_a_choice_and_says_so(tmp_path: Path) -> None:
    def shift(rows: list[Row]) -> None:
        rows[0]["loss_mask"] = [0, 1, 1, 1]

    run = RunFiles(make_run(tmp_path / "run", steps=60, fault=shift))
    embedded = embed(Answers([run]))
    steps = [step for first, last in embedded["steps?run=0"]["train"] for step in range(first, last + 1)]
    assert len(steps) == 24 and {0, 3, 59} <= set(steps)
    assert "of 26 of 62 steps and evaluations" in embedded["note"]
    assert len(page("x", embedded)) < 2**20


def test_a_file_is_not_written_in_place_of_a_directory(tmp_path: Path) -> None:
    answers = Answers([RunFiles(make_run(tmp_path / "run"))])
    with pytest.raises(InvalidSetting, match="--html"):
        write_html(tmp_path, answers)
    somebodys = tmp_path / "thesis.html"
    somebodys.write_text("<!doctype html>\n<title>Thesis</title>")
    with pytest.raises(InvalidSetting, match="--html: .*thesis.html is not a page of a run, and is not replaced"):
        write_html(somebodys, answers)
    assert "Thesis" in somebodys.read_text()
    for _ in range(2):
        write_html(tmp_path / "page.html", answers)
