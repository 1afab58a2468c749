"""`./pants` and `scripts/quickstart` take over pip's configuration."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

import machine_settings


def test_a_machine_without_settings_adds_none() -> None:
    assert machine_settings.render(machine_settings.fragment({}, {})) == ""


def test_indexes_wheels_and_certificates_are_taken_over(tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    authority.touch()
    pip = {
        "index-url": "https://mirror.example/simple",
        "extra-index-url": "https://one.example/simple https://two.example/simple",
        "find-links": str(tmp_path),
        "cert": str(authority),
    }
    settings = tomllib.loads(machine_settings.render(machine_settings.fragment(pip, {})))
    assert settings["python-repos"]["indexes"] == [pip["index-url"], *pip["extra-index-url"].split()]
    assert settings["python-repos"]["find_links"] == [tmp_path.as_uri()]
    assert settings["GLOBAL"]["ca_certs_path"] == str(authority)
    assert f"UV_FIND_LINKS={tmp_path.as_uri()}" in settings["test"]["extra_env_vars"]["add"]


def test_extra_indexes_come_after_the_default_one() -> None:
    settings = machine_settings.fragment({"extra-index-url": "https://extra.example/simple"}, {})
    assert settings["python-repos"] == {"indexes.add": ["https://extra.example/simple"]}


def test_the_environment_wins_over_files() -> None:
    listing = ":env:.find-links='/from/environment'\nglobal.find-links='/from/a/file'\nglobal.cert='/ca.pem'\n"
    assert machine_settings.pip_settings(listing) == {"find-links": "/from/environment", "cert": "/ca.pem"}


def test_an_empty_setting_hides_no_other() -> None:
    listing = ":env:.index-url=''\nglobal.index-url='https://from.example/simple'\n"
    assert machine_settings.pip_settings(listing) == {"index-url": "https://from.example/simple"}


def test_the_file_is_private(tmp_path: Path) -> None:
    path = machine_settings.write(tmp_path / "cache", "global.index-url='https://user:secret@from.example/simple'\n")
    assert os.stat(path).st_mode & 0o077 == 0
    assert "secret" in path.read_text()


def test_settings_of_two_checkouts_at_once_have_a_file_each(tmp_path: Path) -> None:
    listings = [f"global.find-links='{tmp_path / name}'\n" for name in ("one", "two")]
    first, second = (machine_settings.write(tmp_path, listing) for listing in listings)
    assert "/one" in first.read_text() and "/two" in second.read_text()
    assert machine_settings.write(tmp_path, listings[0]) == first


def test_uv_installs_from_where_pip_would() -> None:
    pip = {"index-url": "https://a.example/simple", "trusted-host": "a.example\nb.example", "timeout": "60.0"}
    caps = {"constraint": "/etc/caps.txt more.txt", "cache-dir": "/caches/pip", "no-cache-dir": "1"}
    assert machine_settings.uv_variables(pip | caps, {}) == {
        "UV_DEFAULT_INDEX": "https://a.example/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_NO_CACHE": "1",
        "UV_CONSTRAINT": f"/etc/caps.txt {Path('more.txt').absolute()}",
        "UV_CACHE_DIR": os.path.join("/caches/pip", "uv"),
        "UV_INSECURE_HOST": "a.example b.example",
        "UV_HTTP_TIMEOUT": "60",
    }
    assert machine_settings.uv_variables({"no-cache-dir": "0"}, {}) == {}


@pytest.mark.parametrize(("option", "code"), [("retries", 0), ("require-hashes", 1), ("no-index", 1)])
def test_an_option_that_uv_has_no_variable_for_is_left_to_pip(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, code: int
) -> None:
    listing = f"global.{option}='1'\nglobal.index-url='https://a.example/simple'\n"
    monkeypatch.setattr(machine_settings, "pip_listing", lambda: listing)
    assert machine_settings.main("--uv") == code
    assert ("UV_DEFAULT_INDEX=https://a.example/simple" in capsys.readouterr().out) is (code == 0)
