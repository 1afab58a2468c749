"""The `slime` command."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from slime.types.errors import ConfigError, SlimeError

USAGE = """usage: slime COMMAND ...

commands:
  train    train a policy by reinforcement learning (slime train --help)

`slime COMMAND --help` describes a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 the run failed, 2 wrong flags or files, 130 Ctrl-C, 143 SIGTERM."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if words else 2
    if words[0] != "train":
        print(f"slime: error: unknown command {words[0]!r}, expected train", file=sys.stderr)
        return 2
    return run_train(words[1:])


def run_train(argv: Sequence[str], next_command: str = "") -> int:
    from slime.launcher import flags
    from slime.launcher.supervise import Terminated, terminate_as_interrupt

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        with terminate_as_interrupt():
            config = flags.parse(argv)
            from slime.launcher.metrics.report import Report
            from slime.launcher.train import train

            settings = config.launcher
            with Report(
                config.output_dir.resolve(), num_steps=settings.num_rollout, tensorboard_dir=config.tensorboard_dir
            ) as report:
                report.next_command = next_command
                train(config, report)
        return 0
    except Terminated:
        print("slime: terminated; everything that this run started has been stopped", file=sys.stderr)
        return 143
    except KeyboardInterrupt:
        print("slime: interrupted; everything that this run started has been stopped", file=sys.stderr)
        return 130
    except ConfigError as error:
        print(f"slime: error: {error}", file=sys.stderr)
        return 2
    except SlimeError as error:
        print(f"slime: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
