"""The workflows: generated ones are what their templates make, and every file and job that one names exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import settings

import check_release
import count_tests
import declared_gpus
import property_tests
import set_repository

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"
GENERATOR = WORKFLOWS / "generate_github_workflows.py"
LABELS = {
    "run-ci-short": "e2e-test-short",
    "run-ci-fsdp": "e2e-test-fsdp",
    "run-ci-megatron": "e2e-test-megatron",
    "run-ci-precision": "e2e-test-precision",
    "run-ci-parity": "e2e-test-parity",
    "run-ci-ckpt": "e2e-test-ckpt",
    "run-ci-slow": "e2e-test-slow",
    "run-ci-image": "e2e-test-image",
    "run-ci-changed": "detect-changed",
}
NAMES = sorted(path.name for path in WORKFLOWS.glob("*.yml"))


def workflow(name: str) -> dict[Any, Any]:
    return yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))


def generate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, GENERATOR, *arguments], capture_output=True, text=True, timeout=60)


def entries(job: dict[str, Any]) -> list[dict[str, Any]]:
    matrix = job.get("strategy", {}).get("matrix", {})
    return matrix["info"] if isinstance(matrix, dict) and "info" in matrix else []


def test_generated_workflows_are_what_their_templates_make() -> None:
    done = generate("--check")
    assert done.returncode == 0, done.stderr


def test_a_template_is_written_and_a_stale_workflow_found(tmp_path: Path) -> None:
    (tmp_path / "a.yml.j2").write_text("<% for x in [1, 2] %>\n- ${{ x }} << x >>\n<% endfor %>\n")
    done = generate("--directory", tmp_path)
    assert done.returncode == 0 and "Generated a.yml from a.yml.j2" in done.stdout
    text = (tmp_path / "a.yml").read_text()
    assert text.startswith("# Generated from a.yml.j2") and text.endswith("- ${{ x }} 1\n- ${{ x }} 2\n")
    assert generate("--check", "--directory", tmp_path).returncode == 0
    (tmp_path / "a.yml").write_text(text + "# by hand\n")
    done = generate("--check", "--directory", tmp_path)
    assert done.returncode == 1 and "a.yml is not what a.yml.j2 makes" in done.stderr
    assert (tmp_path / "a.yml").read_text().endswith("# by hand\n")
    (tmp_path / "a.yml.j2").write_text("<< nothing >>")
    assert generate("--directory", tmp_path).returncode == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_workflow_has_the_form_that_github_reads(name: str) -> None:
    text = (WORKFLOWS / name).read_text(encoding="utf-8")
    loaded = workflow(name)
    # In YAML 1.1 the key `on` is a boolean.
    assert loaded["name"] and loaded[True] and loaded["permissions"] == {"contents": "read"}
    assert "<%" not in text and "<<" not in text and text.count("${{") == len(re.findall(r"\$\{\{ .+? \}\}", text))
    for job_name, job in loaded["jobs"].items():
        assert job["runs-on"] and job["timeout-minutes"], job_name
        needed = job.get("needs", [])
        assert set([needed] if isinstance(needed, str) else needed) <= loaded["jobs"].keys()
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), step
            assert step.keys() <= {"name", "id", "if", "env", "run", "uses", "with"}
            # Text of a pull request is not a part of a shell command.
            assert "github." not in str(step.get("run", "")) and "test_file" not in str(step.get("run", ""))


def test_the_counter_of_tests_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="^0$"):
        count_tests.main(["--help"])
    assert "DIRECTORY" in capsys.readouterr().out


def test_the_counter_of_tests_gives_each_reason_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = '<testcase classname="c" name="passed"/><testcase classname="c" name="slow"><skipped/></testcase>'
    for name, kind, reason in [("a", "error", "lost"), ("b", "failure", "wrong " * 1000), ("d", "error", "lost")]:
        cases += f'<testcase classname="c" name="{name}"><{kind} message="{reason}"/></testcase>'
    (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert count_tests.main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["failed: c::a", "failed: c::d", "  lost"] and lines[3] == "failed: c::b"
    assert lines[4].startswith("  wrong wrong") and " […] " in lines[4] and len(lines[4]) < 2100
    assert lines[5:] == ["1 passed, 3 failed, 1 skipped"]


def test_each_night_runs_random_examples_and_slow_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    nightly = workflow("nightly.yml")
    assert nightly[True]["schedule"]
    assert nightly["jobs"]["random-examples"]["steps"][-1]["run"] == "python scripts/property_tests.py"
    slow = nightly["jobs"]["slow-cases"]
    assert slow["env"]["SLIME_SLOW"] == "1" and slow["steps"][-1]["run"] == "./pants test ::"
    called: list[str] = []
    monkeypatch.setattr(pytest, "main", lambda arguments: called.extend(arguments) or 0)
    assert property_tests.main(["FILE"]) == 0
    assert called == ["-m", "hypothesis", f"--hypothesis-profile={property_tests.PROFILE}", "FILE"]
    assert not settings.get_profile(property_tests.PROFILE).derandomize


def test_each_label_has_its_job_and_a_manual_run_has_all() -> None:
    jobs = workflow("pr-test.yml")["jobs"]
    for label, job in LABELS.items():
        assert jobs[job]["if"] == f"github.event_name == 'workflow_dispatch' || github.event.label.name == '{label}'"
    assert jobs.keys() == {*LABELS.values(), "e2e-test-changed"}
    assert jobs["e2e-test-changed"]["needs"] == "detect-changed"


@pytest.mark.parametrize("job", [job for job in LABELS.values() if job != "detect-changed"])
def test_a_job_names_tests_that_exist_with_their_gpus(job: str) -> None:
    tests = entries(workflow("pr-test.yml")["jobs"][job])
    assert tests and len({entry["command"] for entry in tests}) == len(tests)
    for entry in tests:
        path = entry["test_file"]
        source = (ROOT / path).read_text(encoding="utf-8")
        declared = declared_gpus.num_gpus(path, source) if "NUM_GPUS" in source else 0
        assert entry["num_gpus"] == declared, path
        command = shlex.join(declared_gpus.command(path, declared, declared_gpus.runs_directly(source)))
        assert entry["command"] == command or entry["command"].startswith(command + " "), path


def test_the_image_runs_what_all_labels_run() -> None:
    jobs = workflow("pr-test.yml")["jobs"]
    in_image = {entry["command"] for entry in entries(jobs["e2e-test-image"])}
    # TRL is not a part of an image: its test makes an environment of its own, from an index. The slow tests take hours.
    for job in set(LABELS.values()) - {"e2e-test-parity", "e2e-test-slow"}:
        assert {entry["command"] for entry in entries(jobs[job])} <= in_image
    gpu_tests = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert gpu_tests <= {entry["test_file"] for entry in entries(jobs["e2e-test-image"])}


def test_all_workflows_use_the_same_tools() -> None:
    used: dict[str, set[str]] = {}
    for name in NAMES:
        for action, version in re.findall(r"uses: (\S+)@(\S+)", (WORKFLOWS / name).read_text()):
            assert re.fullmatch("[0-9a-f]{40}", version), f"{action} is pinned by tag"
            used.setdefault(action, set()).add(version)
        assert "PIP_EXTRA_INDEX_URL: ${{ vars.PIP_EXTRA_INDEX_URL }}" in (WORKFLOWS / name).read_text()
    assert all(len(versions) == 1 for versions in used.values()), used


def test_a_release_is_published_by_trust_and_signed() -> None:
    jobs = workflow("release.yml")["jobs"]
    assert workflow("release.yml")[True] == {"push": {"tags": ["v[0-9]+.[0-9]+.[0-9]+"]}}
    assert "permissions" not in jobs["build"], "what runs the code of others cannot publish"
    assert jobs["publish"]["permissions"] == {"id-token": "write", "attestations": "write", "contents": "read"}
    assert jobs["publish"]["environment"] == "pypi" and "secrets." not in (WORKFLOWS / "release.yml").read_text()
    used = [step["uses"].partition("@")[0] for step in jobs["publish"]["steps"] if "uses" in step]
    assert used[1:] == ["actions/attest-build-provenance", "actions/attest-sbom", "pypa/gh-action-pypi-publish"]


def test_a_release_names_one_version_everywhere(tmp_path: Path) -> None:
    def faults(tag: str) -> str:
        return "\n".join(check_release.faults(tag, tmp_path))

    for path in ROOT.glob("packages/*/pyproject.toml"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True)
        copy.write_text(path.read_text())
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "\n## Unreleased\n" in changelog
    (tmp_path / "CHANGELOG.md").write_text(changelog)
    assert "packages/all/pyproject.toml has version 0.1.0: run scripts/set_version.py 3.0.0" in faults("v3.0.0")
    assert faults("v0.1.0") == "CHANGELOG.md has no heading '## 0.1.0 - YYYY-MM-DD'"
    (tmp_path / "CHANGELOG.md").write_text(changelog.replace("## Unreleased", "## 0.1.0 - 2026-12-01"))
    assert faults("v0.1.0") == ""


def test_a_release_links_the_pages_of_packages_to_the_files_of_its_tag(tmp_path: Path) -> None:
    for path in [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("packages/*/README.md")]:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    set_repository.main("https://host.example/owner/slime", "v1.0.0", tmp_path)
    base = "https://host.example/owner/slime/blob/v1.0.0/"
    pages = sorted(tmp_path.glob("packages/*/README.md"))
    assert len(pages) == 7
    for page in pages:
        urls = tomllib.loads(page.with_name("pyproject.toml").read_text())["project"]["urls"]
        assert urls.keys() == {"Homepage", "Documentation", "Changelog", "Issues"}
        assert urls["Documentation"] == f"{base}packages/{page.parent.name}/README.md"
        targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
        inside = [target.removeprefix(base).partition("#")[0] for target in targets if target.startswith(base)]
        assert inside and [path for path in inside if not (ROOT / path).exists()] == []
        assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    steps = [step.get("run", "") for step in workflow("release.yml")["jobs"]["build"]["steps"]]
    (links,) = [n for n, run in enumerate(steps) if "scripts/set_repository.py" in run]
    assert links < steps.index("./pants package packages::")
    with pytest.raises(SystemExit, match="must be https://HOST/OWNER/NAME, got 'slime'"):
        set_repository.main("slime", "v1.0.0", tmp_path)


def test_a_push_to_a_labelled_pull_request_runs_nothing_of_it() -> None:
    assert workflow("pr-test.yml")[True]["pull_request"]["types"] == ["labeled"]


def test_containers_for_gpus_have_no_privileges_and_are_named_by_digest() -> None:
    text = (WORKFLOWS / "pr-test.yml").read_text()
    assert "docker run" in text and "--privileged" not in text and "--ipc=host" not in text
    assert ":latest" not in text and text.count("*@sha256:*) ;;") == text.count("docker run")


def test_what_is_installed_from_an_index_has_hashes() -> None:
    for name in NAMES:
        for command in re.findall(r"pip install (.*?)(?:\n(?! {10,}-e)|$)", (WORKFLOWS / name).read_text(), re.S):
            from_index = "--no-index" not in command and not ("--no-deps" in command and "-e packages/" in command)
            assert not from_index or "--require-hashes" in command, command
        for command in re.findall(r"pip (?:wheel|download) (.*)", (WORKFLOWS / name).read_text()):
            assert "--require-hashes" in command or "--no-index" in command, command


def test_the_hashed_requirements_are_those_of_the_constraints() -> None:
    def pinned(path: Path) -> set[str]:
        return {line.split()[0].lower() for line in path.read_text().splitlines() if re.match(r"[A-Za-z0-9].*==", line)}

    constraints = pinned(ROOT / "constraints.txt")
    for system in ("ci", "macos"):
        assert constraints <= pinned(WORKFLOWS.parent / f"requirements-{system}.txt"), "run .github/lock-requirements"
    assert pinned(WORKFLOWS.parent / "requirements-image.txt") <= constraints, "run .github/lock-requirements"


def test_main_is_tried_on_macos_with_what_the_docs_say_of_it() -> None:
    job = workflow("ci.yml")["jobs"]["macos"]
    commands = "\n".join(step.get("run", "") for step in job["steps"])
    assert job["runs-on"].startswith("macos-") and job["if"] == "github.event_name == 'push'"
    assert "./scripts/quickstart --tiny " in commands and "install" in commands
    tested = re.search(r"-m pytest (.*)", commands)
    assert tested and all((ROOT / path / "tests").is_dir() for path in tested[1].split())
    assert f"`{job['runs-on']}`" in (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")


def test_a_pull_request_runs_what_it_can_break_and_main_runs_all() -> None:
    steps = {
        step.get("if"): step["run"]
        for step in workflow("ci.yml")["jobs"]["pants"]["steps"]
        if "pants" in step.get("run", "")
    }
    changed = "./pants --changed-since=origin/main --changed-dependents=transitive lint check test"
    assert steps["github.event_name == 'pull_request'"] == changed
    assert steps["github.event_name == 'push'"] == "./pants lint check test ::"
