"""`./pants` takes over pip's configuration."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pants_machine


def test_a_machine_without_settings_adds_none() -> None:
    assert pants_machine.render(pants_machine.fragment({}, {})) == ""


def test_indexes_wheels_and_certificates_are_taken_over(tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    authority.touch()
    pip = {
        "index-url": "https://mirror.example/simple",
        "extra-index-url": "https://one.example/simple https://two.example/simple",
        "find-links": str(tmp_path),
        "cert": str(authority),
    }
    settings = tomllib.loads(pants_machine.render(pants_machine.fragment(pip, {})))
    assert settings["python-repos"]["indexes"] == [pip["index-url"], *pip["extra-index-url"].split()]
    assert settings["python-repos"]["find_links"] == [tmp_path.as_uri()]
    assert settings["GLOBAL"]["ca_certs_path"] == str(authority)
    assert f"UV_FIND_LINKS={tmp_path.as_uri()}" in settings["test"]["extra_env_vars"]["add"]


def test_extra_indexes_come_after_the_default_one() -> None:
    settings = pants_machine.fragment({"extra-index-url": "https://extra.example/simple"}, {})
    assert settings["python-repos"] == {"indexes.add": ["https://extra.example/simple"]}


def test_the_environment_wins_over_files() -> None:
    listing = ":env:.find-links='/from/environment'\nglobal.find-links='/from/a/file'\nglobal.cert='/ca.pem'\n"
    assert pants_machine.pip_settings(listing) == {"find-links": "/from/environment", "cert": "/ca.pem"}


def test_the_file_is_private(tmp_path: Path) -> None:
    path = pants_machine.write(tmp_path / "cache", "global.index-url='https://user:secret@from.example/simple'\n")
    assert os.stat(path).st_mode & 0o077 == 0
    assert "secret" in path.read_text()


def test_settings_of_two_checkouts_at_once_have_a_file_each(tmp_path: Path) -> None:
    listings = [f"global.find-links='{tmp_path / name}'\n" for name in ("one", "two")]
    first, second = (pants_machine.write(tmp_path, listing) for listing in listings)
    assert "/one" in first.read_text() and "/two" in second.read_text()
    assert pants_machine.write(tmp_path, listings[0]) == first
