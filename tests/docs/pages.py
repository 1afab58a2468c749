"""The pages of the repository, and what they hold: links, anchors, fenced blocks, commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = ("*.md", "docs/**/*.md", "packages/*/README.md", "examples/**/*.md", "tests/*/README.md")
PACKAGES = ("types", "buffer", "rollout", "trainer", "converters", "launcher")

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,})(?P<language>[^\n`]*)\n(?P<text>.*?)^ *(?P=fence) *$", re.M | re.S)
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_HTML = re.compile(r"<(?:img|source|a)\b[^>]*?\b(?:src|srcset|href)=\"([^\"]+)\"")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.M)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    found = {path for pattern in PATTERNS for path in ROOT.glob(pattern)}
    return sorted(path for path in found if "node_modules" not in path.parts)


@cache
def content(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page; `line` is that of the opening fence."""
    for match in _FENCE.finditer(content(page)):
        line = content(page).count("\n", 0, match.start()) + 1
        indent = match["indent"]
        lines = match["text"].splitlines(keepends=True)
        text = "".join(row.removeprefix(indent) for row in lines)
        yield Block(page, line, match["language"].strip(), text)


def prose(page: Path) -> str:
    """A page without its fenced blocks and without `code`."""
    return re.sub(r"`[^`\n]+`", "code", _FENCE.sub("", content(page)))


def links(page: Path) -> list[str]:
    text = prose(page)
    return [*_LINK.findall(text), *_HTML.findall(text)]


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors that a code host gives the headings of a page."""
    seen: dict[str, int] = {}
    found = set()
    for heading in _HEADING.findall(_FENCE.sub("", content(page))):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        found.add(f"{slug}-{count}" if count else slug)
    return frozenset(found)


def commands(block: Block) -> Iterator[list[str]]:
    """The commands of a bash block as words; `...`, comments and what a shell would substitute are left out."""
    text = block.text.replace("\\\n", " ")
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;()<>")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        command: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;()"):
                if command:
                    yield command
                command = []
            elif word != "...":
                command.append(word)
