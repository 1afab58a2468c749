"""Compatibility: `slime.utils.arguments.parse_args`, the settings of a run as the `args` of plug-ins have them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from slime.launcher.config import run_config

__all__ = ["parse_args"]


def parse_args(
    add_custom_arguments: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
) -> argparse.Namespace:
    """Returns every setting of the command line of this process, checked as `slime train` checks them.

    add_custom_arguments: adds flags of the caller to a parser and returns it; they come before those of slime.
    Raises ConfigError for a flag that is unknown or does not fit.
    """
    caller_args, words = argparse.Namespace(), sys.argv[1:]
    if add_custom_arguments is not None:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        caller_args, words = (add_custom_arguments(parser) or parser).parse_known_args(words)
    return argparse.Namespace(**{**run_config.parse(words).flat, **vars(caller_args)})
