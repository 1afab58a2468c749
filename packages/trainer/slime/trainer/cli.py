"""`slime-trainer serve`: one rank of a trainer."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from slime.converters.megatron.flags import MegatronSettings, check_backend, given, why_refused
from slime.trainer.settings.checks import refuse_nuclei_without_gradient
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.addresses import check_address, parse_address
from slime.types.errors import ConfigError, InvalidSetting, NotAvailable, SlimeError, UnknownFlag
from slime.types.programs import command_list, run_printing, wrong_command
from slime.types.rpc import RpcSettings
from slime.types.setting_values import flag_name
from slime.types.settings import parse, setting

COMMANDS = {"serve": "Train on the steps of a buffer and push the weights to the engines: one process for each rank"}
USAGE = f"""\
usage: slime-trainer serve --hf-checkpoint DIR --buffer-address HOST:PORT --rollout-address HOST:PORT ...

{command_list(COMMANDS)}

`slime-trainer COMMAND --help` describes a command."""


def _environment_int(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise InvalidSetting.must_be(f"environment variable {name}", "an integer", got=text) from None


def _environment_master() -> str | None:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not (host and port):
        return None
    return check_address(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", "MASTER_ADDR:MASTER_PORT")


def _meeting_point(text: str) -> str:
    return text if text.startswith("file://") else parse_address(text)


@dataclasses.dataclass(kw_only=True)
class PlaceSettings:
    """Place of this process."""

    buffer_address: str = setting(
        "", "Address of the buffer service (required)", metavar="HOST:PORT", parse=parse_address
    )
    rollout_address: str = setting(
        "", "Address of the rollout service (required)", metavar="HOST:PORT", parse=parse_address
    )
    rank: int | None = setting(None, "Rank of this process (default: environment variable RANK, else 0)", minimum=0)
    world_size: int | None = setting(
        None, "Number of ranks (default: environment variable WORLD_SIZE, else 1)", minimum=1
    )
    master_address: str | None = setting(
        None,
        "Address at which rank 0 waits for the others (default: MASTER_ADDR:MASTER_PORT of the environment)",
        metavar="HOST:PORT",
        parse=_meeting_point,
    )
    write_below: list[str] = setting(
        list, "Directories below which calls may save checkpoints and models (default: nowhere)", metavar="DIR"
    )

    def __post_init__(self) -> None:
        for name in ("buffer_address", "rollout_address"):
            if not getattr(self, name):
                raise InvalidSetting.required(flag_name(name), f"HOST:PORT of the {name.partition('_')[0]} service")
        self.rank = _environment_int("RANK", 0) if self.rank is None else self.rank
        self.world_size = _environment_int("WORLD_SIZE", 1) if self.world_size is None else self.world_size
        self.master_address = self.master_address or _environment_master()
        if self.rank >= self.world_size:
            raise InvalidSetting.must_be("--rank", f"below --world-size {self.world_size}", got=self.rank)
        if self.world_size > 1 and self.master_address is None:
            raise InvalidSetting.requires(
                f"--world-size {self.world_size}", "--master-address HOST:PORT", "the ranks meet there"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 after a clean stop, 2 for a wrong command line or file, 1 for any other failure, 141 if its reader
    left."""
    return run_printing("slime-trainer", partial(_run, list(sys.argv[1:] if argv is None else argv)))


def _run(arguments: list[str]) -> int:
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if arguments[:1] != ["serve"]:
        print(f"slime-trainer: error: {wrong_command(arguments, COMMANDS)}", file=sys.stderr)
        return 2
    try:
        settings, megatron, rpc, place = parse(
            arguments[1:],
            TrainerSettings,
            MegatronSettings,
            RpcSettings,
            PlaceSettings,
            prog="slime-trainer serve",
            description="One rank of a trainer. With --train-backend megatron it also takes Megatron's flags: see "
            "docs/flags.md.",
        )
        check_backend(settings.train_backend, given(megatron))
        return _serve(settings, given(megatron), rpc, place)
    except ConfigError as error:
        reason = why_refused(error.field) if isinstance(error, UnknownFlag) else None
        message = str(NotAvailable.unavailable(error.field, reason) if reason else error)
        print(f"slime-trainer: error: {message}", file=sys.stderr)
        return 2
    except SlimeError as error:
        print(f"slime-trainer: error: {error}", file=sys.stderr)
        return 1


def _serve(settings: TrainerSettings, megatron: dict[str, Any], rpc: RpcSettings, place: PlaceSettings) -> int:
    refuse_nuclei_without_gradient(settings)
    from slime.trainer.service import serve

    stop = threading.Event()
    # Before it serves there is nothing to clean up, and joining the other ranks may take minutes.
    _on_stop(lambda: os._exit(0))
    service = serve(
        settings,
        rpc,
        rank=place.rank or 0,
        world_size=place.world_size or 1,
        master_address=place.master_address or "",
        buffer_address=place.buffer_address,
        rollout_address=place.rollout_address,
        megatron=megatron,
        write_below=place.write_below,
    )
    _on_stop(stop.set)
    with service:
        print(f"listening on {service.address}", flush=True)
        if service.token_file is not None:
            print(f"callers need the token in {service.token_file}", flush=True)
        # A signal may be delivered to another thread, which does not end a wait on this one.
        while not stop.wait(0.5):
            pass
    return 0


def _on_stop(action: Callable[[], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: action())


if __name__ == "__main__":
    sys.exit(main())
