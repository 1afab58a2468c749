"""`slime-buffer`: serves a buffer, shows and drops groups, checks, repairs and copies what it stores, prints tokens."""

from __future__ import annotations

import select
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from slime.buffer.maintenance import groups_command
from slime.buffer.settings import BufferSettings
from slime.buffer.store.urls import STORE
from slime.types.errors import ConfigError, InvalidSetting, NotAvailable, SlimeError, counted
from slime.types.programs import command_list, run_printing, wrong_command
from slime.types.rpc import RpcSettings
from slime.types.rpc.auth import read_token
from slime.types.rpc.roles import Role, role_token
from slime.types.setting_values import named_path
from slime.types.settings import REQUIRED, Parser, parse, setting

PROG = "slime-buffer"
# Seconds between checks whether this server may still serve.
CHECK_SECONDS = 1.0
DIR = "Directory of the buffer (its --buffer-dir)"
DEST = "Directory to create; it must not exist"
STORAGE_COMMANDS = {
    "check": "Read the database and every payload of a buffer that is not served; exit code 1 if there is a problem",
    "repair": "Move payloads that no group names to lost+found beside them, and take unreadable groups out of the run",
    "backup": "Copy a buffer with a --buffer-dir, even while it is served, to the new directory DEST",
}
PRINTING_COMMANDS = {
    "groups": "List groups, show their samples, or take groups out of a run",
    **STORAGE_COMMANDS,
    "token": "Print the token of a role, derived from the token of the service in FILE",
}
COMMANDS = {"serve": "Serve a data buffer over gRPC", **PRINTING_COMMANDS}
USAGE = f"""usage: {PROG} serve [--prompt-data PATH] [--buffer-dir DIR] [--port N] ...
       {PROG} groups {{list,show,reject,quarantine}} (--address HOST:PORT | --buffer-dir DIR | {STORE} URL) ...
       {PROG} check [DIR] [--buffer-store URL] [--buffer-payloads URL]
       {PROG} repair [DIR] [--buffer-store URL] [--buffer-payloads URL]
       {PROG} backup DIR DEST [--buffer-payloads URL]
       {PROG} token {{{",".join(Role)}}} --token-file FILE

{command_list(COMMANDS)}

`{PROG} COMMAND --help` describes a command."""


@dataclass(kw_only=True)
class TokenSettings:
    """Token."""

    token_file: str = setting(REQUIRED, "File (mode 0600) with the service's own token", metavar="FILE")


@dataclass(kw_only=True)
class StandbySettings:
    """Takeover."""

    standby: bool = setting(
        False,
        "While another slime-buffer serves --buffer-store, wait without listening, and take over when it ends or loses "
        "its connection",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 after a clean stop, 2 for wrong settings, 1 for any other error, 141 if its reader left."""
    return run_printing(PROG, partial(_run, list(sys.argv[1:] if argv is None else argv)))


def _run(words: list[str]) -> int:
    if words[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    try:
        if words and words[0] in PRINTING_COMMANDS:
            return print_answer(words[0], words[1:])
        if words[:1] != ["serve"]:
            raise wrong_command(words, COMMANDS)
        settings, rpc, takeover = parse(
            words[1:], BufferSettings, RpcSettings, StandbySettings, prog=f"{PROG} serve",
            description=f"{COMMANDS['serve']}.",
        )  # fmt: skip
        if takeover.standby and settings.buffer_store is None:
            raise InvalidSetting.requires("--standby", "--buffer-store URL", "one process can use a --buffer-dir")
        return serve_until_signal(settings, rpc, standby=takeover.standby)
    except SlimeError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


class Signals:
    """Keeps SIGINT and SIGTERM for `wait`, whichever thread they are delivered to. Used in the main thread."""

    def __enter__(self) -> Self:
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(self._write.fileno())
        self._before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds`; returns whether a signal has come since the block began."""
        return bool(select.select([self._read], [], [], seconds)[0])

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        self._read.close()
        self._write.close()


def serve_until_signal(settings: BufferSettings, rpc: RpcSettings, *, standby: bool = False) -> int:
    from slime.buffer.service import serve
    from slime.buffer.store.postgres_session import StandbyEnded

    with Signals() as signals:
        try:
            with serve(settings, rpc, standby=signals.wait if standby else None) as service:
                print(f"listening on {service.address}", flush=True)
                if service.token_file is not None:
                    print(f"callers need the token in {service.token_file}", flush=True)
                while not signals.wait(CHECK_SECONDS):
                    service.buffer.store.check()
        except StandbyEnded:
            pass
    return 0


def print_answer(command: str, words: Sequence[str]) -> int:
    """Runs a command that prints and ends; returns its exit code."""
    if command == "token":
        return print_token(words)
    if command == "groups":
        return groups_command.main(words, f"{PROG} groups")
    return run_storage_command(command, words)


def run_storage_command(command: str, words: Sequence[str]) -> int:
    """Runs `check`, `repair` or `backup`; returns the exit code."""
    from slime.buffer.maintenance import storage_commands

    parser = Parser(prog=f"{PROG} {command}", description=f"{STORAGE_COMMANDS[command]}.")
    parser.add_argument("directory", metavar="DIR", nargs="?", help=DIR)
    if command == "backup":
        parser.add_argument("target", metavar="DEST", nargs="?", type=named_path, help=DEST)
    parser.add_argument("--buffer-dir", metavar="DIR", help="The same as DIR")
    groups_command.add_store_flags(parser)
    options = parser.parse_strict(words)
    if options.buffer_dir is not None:
        if command == "backup" and options.target is None:
            options.directory, options.target = None, options.directory and Path(options.directory)
        if options.directory is not None:
            raise InvalidSetting.conflict(f"DIR {options.directory}", "--buffer-dir", "both name the directory")
        options.directory = options.buffer_dir
    if options.directory is None and options.buffer_store is None:
        raise InvalidSetting.required("DIR", f"{DIR}, or {STORE} URL")
    if command == "backup" and options.buffer_store is not None:
        raise NotAvailable.unavailable(
            f"backup with {STORE}",
            "PostgreSQL makes backups itself",
            "pg_dump, and copy the samples after it has ended",
        )
    settings = BufferSettings(
        buffer_dir=options.directory, buffer_store=options.buffer_store, buffer_payloads=options.buffer_payloads
    )
    if command == "backup":
        if options.target is None:
            raise InvalidSetting.required("DEST", DEST)
        groups, payloads = storage_commands.backup(settings, options.target)
        print(f"{options.target}: {counted(groups, 'group')}, samples of {payloads}")
        return 0
    if command == "repair":
        aside, damaged, target = storage_commands.repair(settings)
        print(f"{counted(aside, 'file')} moved to {target}, {counted(damaged, 'damaged group')} taken out of the run")
        return 0
    problems = storage_commands.check(settings)
    for problem in problems:
        print(problem)
    place = options.directory if options.buffer_store is None else options.buffer_store.partition("?")[0]
    print(f"{place}: {counted(len(problems), 'problem') if problems else 'no problems'}")
    return 1 if problems else 0


TOKEN_HELP = """\
Prints the token of a role, derived from the token of the service.

roles:
  feed     Adds prompts
  rollout  Leases groups, returns and completes them
  train    Seals and reads steps, sends weights, writes checkpoints
  read     Reads, and changes nothing

options:
  --token-file FILE  File (mode 0600) with the service's own token (required)"""


def print_token(words: Sequence[str]) -> int:
    if words[:1] in (["-h"], ["--help"]):
        print(f"usage: {PROG} token {{{','.join(Role)}}} --token-file FILE\n\n{TOKEN_HELP}")
        return 0
    if not words or words[0] not in [*Role]:
        raise wrong_command(words, list(Role), "role")
    (settings,) = parse(words[1:], TokenSettings, prog=f"{PROG} token {words[0]}", description="Print a role's token.")
    token = read_token(RpcSettings(token_file=settings.token_file))
    print(role_token(str(token), Role(words[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
