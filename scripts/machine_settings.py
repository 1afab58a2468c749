"""Tells Pants and uv what pip already knows about this machine: indexes, wheel directories, certificates.

    machine_settings.py DIRECTORY
    machine_settings.py --uv

It reads pip's configuration (files and PIP_* variables), so that a machine with a mirror, a local build of torch or its
own certificate authority needs no settings of ours. `./pants` runs the first form before Pants: a pants.toml fragment
in DIRECTORY, empty without such a configuration, whose path is printed. `scripts/quickstart` runs the second, which
prints uv's variables as NAME=VALUE, or ends with exit code 1 where pip has a setting that uv has no variable for. Runs
on Python 3.9.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

# Options that change how pip works or what it prints, not what it installs or from where.
_ONLY_PIPS = {
    "compile", "config-file", "disable-pip-version-check", "log", "no-color", "no-compile", "no-input",
    "no-warn-script-location", "progress-bar", "quiet", "require-virtualenv", "resume-retries", "retries",
    "root-user-action", "verbose",
}  # fmt: skip
_UVS = {
    "index-url", "extra-index-url", "find-links", "constraint", "cert", "trusted-host", "default-timeout",
    "timeout", "cache-dir", "no-cache-dir",
}  # fmt: skip


def pip_listing() -> str:
    command = [sys.executable, "-m", "pip", "config", "list", "--disable-pip-version-check"]
    # A quiet pip lists nothing.
    environment = {**os.environ, "PIP_QUIET": "0"}
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, env=environment).stdout


def pip_settings(listing: str) -> dict[str, str]:
    """Options by name from what `pip config list` prints; the environment wins over `install`, that over `global`."""
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        text = str(ast.literal_eval(value)) if section in found else ""
        if text:  # pip passes over empty ones
            found[section][option] = text
    return {**found["global"], **found["install"], **found[":env:"]}


def absolute(location: str) -> str:
    return location if "://" in location else str(Path(location).expanduser().absolute())


def as_url(location: str) -> str:
    return location if "://" in location else Path(location).expanduser().absolute().as_uri()


def uv_variables(pip: dict[str, str], environment: dict[str, str]) -> dict[str, str]:
    """Returns the variables with which uv installs what pip would."""
    index = pip.get("index-url", "")
    extra = pip.get("extra-index-url", "").split()
    links = [as_url(link) for link in pip.get("find-links", "").split()]
    timeout = pip.get("timeout") or pip.get("default-timeout", "")
    found = {
        "UV_DEFAULT_INDEX": index,
        "UV_INDEX": " ".join(extra),
        "UV_INDEX_STRATEGY": "unsafe-best-match" if index or extra else "",
        # uv wants one list, separated by commas.
        "UV_FIND_LINKS": ",".join(links),
        "UV_NO_CACHE": switch(pip.get("no-cache-dir", "")),
        "UV_CONSTRAINT": " ".join(absolute(file) for file in pip.get("constraint", "").split()),
        "UV_INSECURE_HOST": pip.get("trusted-host", ""),
        "UV_HTTP_TIMEOUT": str(max(1, int(float(timeout)))) if timeout else "",
        "UV_CACHE_DIR": os.path.join(pip["cache-dir"], "uv") if "cache-dir" in pip else "",
        "SSL_CERT_FILE": certificates(pip, environment),
    }
    return {name: " ".join(value.split()) for name, value in found.items() if value}


def switch(value: str) -> str:
    return "1" if value.lower() in ("1", "true", "yes", "on", "y", "t") else ""


def certificates(pip: dict[str, str], environment: dict[str, str]) -> str:
    path = pip.get("cert") or environment.get("REQUESTS_CA_BUNDLE") or environment.get("SSL_CERT_FILE", "")
    return path if path and Path(path).is_file() else ""


def fragment(pip: dict[str, str], environment: dict[str, str]) -> dict[str, dict[str, object]]:
    """Sections and options of the pants.toml fragment."""
    index = pip.get("index-url", "")
    extra = pip.get("extra-index-url", "").split()
    links = [as_url(link) for link in pip.get("find-links", "").split()]

    sections: dict[str, dict[str, object]] = {}
    if index or extra:
        # Without an index of its own, the extra ones come after the one that Pants and uv have by default.
        sections["python-repos"] = {"indexes": [index, *extra]} if index else {"indexes.add": extra}
    if links:
        sections.setdefault("python-repos", {})["find_links"] = links
    if certificates(pip, environment):
        sections["GLOBAL"] = {"ca_certs_path": certificates(pip, environment)}
    variables = uv_variables(pip, environment)
    if variables:
        # Tests that install wheels do so with uv, which does not read pip's files.
        sections["test"] = {"extra_env_vars.add": [f"{name}={value}" for name, value in variables.items()]}
    return sections


def render(sections: dict[str, dict[str, object]]) -> str:
    lines = []
    for name, options in sections.items():
        lines.append(f"[{name}]")
        # JSON strings and lists of them are TOML as well.
        lines += [f"{option} = {json.dumps(value)}" for option, value in options.items()]
        lines.append("")
    return "\n".join(lines)


def write(directory: Path, listing: str) -> Path:
    """Writes the fragment of what `pip config list` prints, and returns its path."""
    text = render(fragment(pip_settings(listing), dict(os.environ)))
    # Named after its content: a Pants that starts beside this one, with other settings, must not change it.
    path = directory / f"machine-{hashlib.sha256(text.encode()).hexdigest()[:16]}.toml"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # Index addresses may hold credentials.
    partial = path.with_suffix(f".{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.replace(partial, path)
    return path


def main(word: str) -> int:
    if word != "--uv":
        print(write(Path(word), pip_listing()))
        return 0
    try:
        pip = pip_settings(pip_listing())
    except subprocess.CalledProcessError:
        return 1  # pip will say itself what is wrong
    if not pip.keys() <= _UVS | _ONLY_PIPS:
        return 1
    print("\n".join(f"{name}={value}" for name, value in uv_variables(pip, dict(os.environ)).items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
