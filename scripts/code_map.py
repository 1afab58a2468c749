"""Writes docs/code-map.md and the code maps of the packages' READMEs from first docstring lines:  code_map.py [--check]

`--check` writes nothing; exit code 1 names pages that are out of date.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("types", "buffer", "rollout", "converters", "trainer", "launcher")
COMPATIBILITY = "Compatibility: "
START, END = "<!-- made by scripts/code_map.py -->", "<!-- end of the code map -->"


def first_line(file: Path) -> str:
    """The first paragraph of a module's docstring as one line of a table; empty without one."""
    if not file.exists():
        return ""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")


def modules(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*.py") if path.name not in ("__init__.py", "__main__.py"))


def folders(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_dir() and any(path.glob("**/*.py")))


def rows(directory: Path) -> Iterator[tuple[str, str]]:
    """The modules of a folder, then its folders, each with what its docstring says."""
    for module in modules(directory):
        yield module.name, first_line(module)
    for folder in folders(directory):
        yield f"{folder.name}/", first_line(folder / "__init__.py") or _held(folder)


def _held(folder: Path) -> str:
    """Describes the content of a folder without a docstring."""
    names = [path.stem for path in modules(folder)] + [f"{path.name}/" for path in folders(folder)]
    return ", ".join(f"`{name}`" for name in names)


def table(entries: Iterator[tuple[str, str]], link: str) -> str:
    lines = ["| | |", "|---|---|"]
    lines += [f"| [`{name}`]({link}{name}) | {text} |" for name, text in entries]
    return "\n".join(lines)


def of_readme(package: str) -> str:
    """The section of a README: the package's own folder."""
    directory = ROOT / "packages" / package / "slime" / package
    link = f"slime/{package}/"
    every = "[docs/code-map.md](../../docs/code-map.md) lists every module."
    return f"## Code map\n\n{START}\n{table(rows(directory), link)}\n\n{every}\n{END}\n"


def readme(package: str, text: str) -> str:
    """The README `text` with its code map as it should be; a map that is not there yet is put at the end."""
    section = of_readme(package)
    if START not in text:
        return text.rstrip() + "\n\n" + section
    before = text[: text.index("## Code map")]
    after = text[text.index(END) + len(END) :].strip("\n")
    return before + section + (f"\n{after}\n" if after else "")


def compatibility() -> str:
    """The modules that keep a path of code written for slime, as their docstrings say."""
    found = [path for package in PACKAGES for path in (ROOT / "packages" / package / "slime").rglob("*.py")]
    lines = ["| import | file | |", "|---|---|---|"]
    for path in sorted(found, key=lambda path: dotted(path)):
        if (text := first_line(path)).startswith(COMPATIBILITY):
            file = path.relative_to(ROOT)
            lines.append(f"| `{dotted(path)}` | [{file.parts[1]}](../{file}) | {text.removeprefix(COMPATIBILITY)} |")
    return "\n".join(lines)


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts[2:]
    return ".".join(parts).removesuffix(".__init__")


def page() -> str:
    parts = [
        "# Code map",
        "Every module and what its docstring says first, made by `python scripts/code_map.py`. "
        "[architecture.md](architecture.md) shows how the packages work together and which files to read first.",
    ]
    for package in PACKAGES:
        top = ROOT / "packages" / package / "slime"
        parts.append(f"## slime-{package}")
        for directory in [top, *sorted(path for path in top.glob("**/") if path != top)]:
            found = modules(directory)
            # Generated code speaks for itself.
            if not found or directory.parts[-2:] == ("slime", "v1"):
                continue
            text = first_line(directory / "__init__.py")
            parts.append(f"### {directory.relative_to(top.parent)}" + (f"\n\n{text}" if text else ""))
            link = f"../{directory.relative_to(ROOT)}/"
            parts.append(table(((path.name, first_line(path)) for path in found), link))
    parts.append("## Compatibility paths")
    parts.append(
        "Modules at paths that plug-ins written for slime import or name in flags. They lie where those paths lead, in "
        "the package whose work they do. [coming-from-slime.md](coming-from-slime.md#plug-ins) says where they differ."
    )
    parts.append(compatibility())
    return "\n\n".join(parts) + "\n"


def wanted() -> dict[Path, str]:
    """The text of every page that holds a map."""
    found = {ROOT / "docs" / "code-map.md": page()}
    for package in PACKAGES:
        path = ROOT / "packages" / package / "README.md"
        found[path] = readme(package, path.read_text(encoding="utf-8"))
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Write the code maps from first docstring lines.")
    parser.add_argument("--check", action="store_true", help="Write nothing; fail where a page is out of date.")
    check = parser.parse_args(argv).check
    stale = [path for path, text in wanted().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{'out of date' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(wanted()[path], encoding="utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
