"""The `slime` program: ends without a traceback if Ctrl-C comes while its modules are imported."""

import sys


def main(*words: str) -> int:
    """Ends the process as `slime.launcher.cli.program` does; returns 130 if Ctrl-C came before it ran.

    words: stand before those of the command line.
    """
    try:
        from slime.launcher.cli import program

        program(*words)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
