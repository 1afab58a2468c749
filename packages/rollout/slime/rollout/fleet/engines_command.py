"""`slime-rollout engines`: lists the engines of a run, and lets external ones join and leave it."""

from __future__ import annotations

from collections.abc import Sequence

from slime.types.addresses import check_address
from slime.types.clients import RolloutClient
from slime.types.clients.rollout import Engine
from slime.types.programs import command_list, wrong_command
from slime.types.rpc import RpcSettings
from slime.types.settings import Parser

PROG = "slime-rollout engines"
ACTIONS = {
    "list": "List the engines of a run",
    "add": "Let a running engine join a run with --rollout-external-engine-addrs",
    "remove": "Let an external engine leave its run, without stopping it",
}
USAGE = f"""usage: {PROG} {{{",".join(ACTIONS)}}} [URL] --address HOST:PORT [--token-file FILE] [--tls-ca FILE]

{command_list(ACTIONS)}

`{PROG} COMMAND --help` describes a command."""
# More than the service allows itself.
SECONDS = 120.0
COLUMNS = ("name", "model", "url", "kind", "state", "weights", "in flight")


def main(words: Sequence[str]) -> int:
    if words[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if not words or words[0] not in ACTIONS:
        raise wrong_command(words, ACTIONS, "engines command")
    action = words[0]
    options = vars(_parser(action).parse_strict(words[1:]))
    rpc = RpcSettings(token_file=options["token_file"], tls_ca=options["tls_ca"])
    with RolloutClient(check_address(options["address"], "--address"), settings=rpc) as client:
        if action == "list":
            rows = _without_empty([COLUMNS, *map(_row, client.status().engines)])
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            for row in rows:
                print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        elif action == "add":
            engine = client.add_engine(options["url"], SECONDS)
            print(f"{engine.name} at {engine.url} {_state(engine)}")
        else:
            client.remove_engine(options["url"], SECONDS)
            print(f"{options['url']} has left the run")
    return 0


def _parser(action: str) -> Parser:
    parser = Parser(prog=f"{PROG} {action}", description=f"{ACTIONS[action]}.")
    if action != "list":
        parser.add_argument("url", metavar="URL", help="HOST:PORT or http://HOST:PORT of the engine")
    parser.add_argument("--address", metavar="HOST:PORT", required=True, help="Address of the rollout service")
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="File with the token of the service or of the role train (for list also read); not needed where the "
        "service generated it on this machine",
    )
    parser.add_argument("--tls-ca", metavar="FILE", help="PEM file of the certificate authority to trust")
    return parser


def _row(engine: Engine) -> tuple[str, ...]:
    weights, in_flight = str(engine.weight_version), str(engine.in_flight)
    return engine.name, engine.model, engine.url, engine.kind, _state(engine), weights, in_flight


def _without_empty(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Leaves out the columns in which no engine has a word: the models, in a run with one."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:]) or len(rows) == 1]
    return list(zip(*columns, strict=True))


def _state(engine: Engine) -> str:
    if engine.awaits_weights:
        return "waits for weights"
    return "serves" if engine.healthy else "does not serve"
