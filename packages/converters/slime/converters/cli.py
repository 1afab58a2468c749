"""The `slime-convert` command."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from slime.converters.settings import GgufToHfSettings, InspectSettings, VerifySettings
from slime.types.errors import ConfigError, SlimeError
from slime.types.settings import Parser, add_flags, build

USAGE = """usage: slime-convert COMMAND ...

commands:
  gguf-to-hf   a GGUF file into a Hugging Face directory
  inspect      names, shapes and types of the tensors of a directory or file
  verify       whether two directories or files hold the same tensors

`slime-convert COMMAND --help` describes a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 failed or different, 2 wrong arguments or files, 130 Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if words else 2
    commands: dict[str, Callable[[list[str]], int]] = {
        "gguf-to-hf": _gguf_to_hf,
        "inspect": _inspect,
        "verify": _verify,
    }
    if words[0] not in commands:
        print(
            f"slime-convert: error: unknown command {words[0]!r}, expected one of {', '.join(commands)}",
            file=sys.stderr,
        )
        return 2
    try:
        return commands[words[0]](words[1:])
    except KeyboardInterrupt:
        return 130
    except SlimeError as error:
        print(f"slime-convert: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _parse(argv: list[str], command: str, settings: type, *positionals: str) -> tuple[Any, dict[str, Any]]:
    parser = Parser(prog=f"slime-convert {command}", description=settings.__doc__)
    for name in positionals:
        parser.add_argument(name, metavar=name.upper(), help="Hugging Face directory or safetensors file")
    add_flags(parser, settings)
    given = vars(parser.parse_strict(argv))
    return build(settings, given), given


def _gguf_to_hf(argv: list[str]) -> int:
    settings, _ = _parse(argv, "gguf-to-hf", GgufToHfSettings)
    from slime.converters.gguf import convert

    start = time.monotonic()

    def progress(text: str) -> None:
        print(f"[{time.monotonic() - start:5.1f} s] {text}", file=sys.stderr, flush=True)

    convert(settings.gguf, settings.output_dir, dtype=settings.dtype, progress=progress)
    return 0


def _inspect(argv: list[str]) -> int:
    settings, given = _parse(argv, "inspect", InspectSettings, "path")
    from slime.converters.inspection import as_text, summarize

    summary = summarize(given["path"], containing=settings.containing)
    print(json.dumps(summary) if settings.json else as_text(summary))
    return 0


def _verify(argv: list[str]) -> int:
    settings, given = _parse(argv, "verify", VerifySettings, "a", "b")
    from slime.converters.safetensors_dir import SafetensorsDir
    from slime.converters.verify import compare

    count = 0
    for difference in compare(given["a"], given["b"], atol=settings.atol):
        count += 1
        if count <= settings.max_shown:
            print(difference)
    if count:
        print(
            f"{count} tensors differ"
            + (f", the first {settings.max_shown} shown" if count > settings.max_shown else "")
        )
        return 1
    print(f"equal: {len(SafetensorsDir(given['a']).tensors)} tensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
