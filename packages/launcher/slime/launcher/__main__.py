"""The `slime` program: ends without a traceback if Ctrl-C comes while its modules are imported."""

import sys


def main() -> int:
    """Ends the process as `slime.launcher.cli.program` does; returns 130 if Ctrl-C came before it ran."""
    try:
        from slime.launcher.cli import program

        program()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
