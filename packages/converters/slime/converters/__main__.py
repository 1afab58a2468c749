"""The `slime-convert` program: ends without a traceback if Ctrl-C comes while its modules are imported."""

import sys


def main() -> int:
    """Returns what `slime.converters.cli.main` returns, and 130 if Ctrl-C came before it ran."""
    try:
        from slime.converters.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
