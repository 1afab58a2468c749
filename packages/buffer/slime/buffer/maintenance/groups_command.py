"""`slime-buffer groups`: shows groups and takes them out of a run, through a server or directly in its storage."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

from slime.buffer.settings import BufferSettings
from slime.buffer.store.base import State
from slime.buffer.store.urls import PAYLOADS, STORE
from slime.types import Sample
from slime.types.addresses import check_address
from slime.types.clients import BufferClient
from slime.types.errors import InvalidField, InvalidSetting, Unauthenticated, counted
from slime.types.programs import command_list, wrong_command
from slime.types.rpc import RpcSettings
from slime.types.sample.validate import validate_finished
from slime.types.setting_values import flag_name
from slime.types.settings import Parser

TEXT_CHARACTERS = 500
COLUMNS = ("group", "state", "step", "samples", "bytes", "attempt", "worker", "reason")
ACTIONS = {
    "list": "List groups, without their samples",
    "show": "Print groups and their samples as JSON, with the reason why a sample cannot be trained on",
    "reject": "Take groups out of the run and delete their samples",
    "quarantine": "Take groups out of the run and keep their samples",
}
SEALED_AGAIN = (
    "If a group is sealed, its step and all later ones lose their plans and are sealed again with the next groups: do "
    "this while no trainer works on that step, then start the run again."
)


def main(words: Sequence[str], prog: str) -> int:
    if words[:1] in (["-h"], ["--help"]):
        print(usage(prog))
        return 0
    if not words or words[0] not in ACTIONS:
        raise wrong_command(words, ACTIONS, "groups command")
    action = words[0]
    options = vars(_parser(action, f"{prog} {action}").parse_strict(words[1:]))
    for index in options.get("index", ()):
        if not -(2**63) <= index < 2**63:
            raise InvalidSetting.must_be("INDEX", "an integer of 64 bits", got=index)
    with _connected(options) as client:
        if action == "list":
            _list(client, options)
        elif action == "show":
            for index in options["index"]:
                _show(client, index)
        else:
            steps = client.drop_groups(options["index"], options["reason"], quarantine=action == "quarantine")
            print(f"{action}: {counted(len(set(options['index'])), 'group')}")
            if steps:
                print(f"to be sealed and planned again: steps {', '.join(map(str, steps))}")
    return 0


def usage(prog: str) -> str:
    synopsis = f"usage: {prog} {{{','.join(ACTIONS)}}} (--address HOST:PORT | --buffer-dir DIR | {STORE} URL) ..."
    return f"{synopsis}\n\n{command_list(ACTIONS)}\n\n`{prog} COMMAND --help` describes a command."


def _parser(action: str, prog: str) -> Parser:
    about = f"{ACTIONS[action]}."
    if action in ("reject", "quarantine"):
        about += " " + SEALED_AGAIN
    parser = Parser(prog=prog, description=about)
    if action != "list":
        parser.add_argument(
            "index", type=int, nargs="+", metavar="INDEX", help="Index of a group, as `groups list` shows it"
        )
    parser.add_argument("--address", metavar="HOST:PORT", help="Address of a buffer that is served")
    parser.add_argument("--buffer-dir", metavar="DIR", help="Directory of a buffer that is not served")
    add_store_flags(parser)
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="File with the token of the service; not needed where the service generated it on this machine",
    )
    parser.add_argument("--tls-ca", metavar="FILE", help="PEM file of the certificate authority to trust")
    if action == "list":
        parser.add_argument(
            "--state",
            action="append",
            default=[],
            choices=[str(s) for s in State],
            help="State of the groups to list (default: all); may be repeated",
        )
        parser.add_argument(
            "--limit", type=int, default=0, metavar="N", help="Largest number of groups to list; 0 for all"
        )
        parser.add_argument("--json", action="store_true", help="Print one JSON object per line")
    elif action != "show":
        parser.add_argument("--reason", default="dropped by an operator", help="Reason to keep with the groups")
    return parser


def add_store_flags(parser: Parser) -> None:
    """Adds the flags for state in a database and samples in an object store."""
    parser.add_argument(STORE, metavar="URL", help=f"PostgreSQL database with the state, as in the {STORE} of the run")
    parser.add_argument(PAYLOADS, metavar="URL", help=f"Object store with the samples, as in the {PAYLOADS} of the run")


@contextmanager
def _connected(options: dict[str, Any]) -> Iterator[BufferClient]:
    rpc = RpcSettings(token_file=options["token_file"], tls_ca=options["tls_ca"])
    places = {name: options[name] for name in ("buffer_dir", "buffer_store", "buffer_payloads")}
    stopped = [flag_name(name) for name, value in places.items() if value is not None]
    if options["address"] is not None:
        if stopped:
            reason = "a buffer that is served is reached by its address alone"
            raise InvalidSetting.conflict(stopped[0], "--address", reason)
        with BufferClient(check_address(options["address"], "--address"), settings=rpc) as client:
            try:
                yield client
            except Unauthenticated as error:
                raise Unauthenticated(
                    f"--address {options['address']}: {error.message}: --token-file names the file with its token",
                    field="--token-file", value=rpc.token_file or "", expected="the token of the service",
                ) from None  # fmt: skip
        return
    if not stopped:
        raise InvalidSetting.required("--address, --buffer-dir or --buffer-store")
    from slime.buffer.buffer import Buffer
    from slime.buffer.service import serve_buffer

    with (
        serve_buffer(Buffer(BufferSettings(**places), existing=True)) as service,
        BufferClient(service.address) as client,
    ):
        yield client


def _list(client: BufferClient, options: dict[str, Any]) -> None:
    groups = client.list_groups(states=options["state"], limit=options["limit"])
    first = list(islice(groups, 1))  # a call that fails does so here, before the head of the table is printed
    if not options["json"]:
        print("  ".join(COLUMNS))
    for group in chain(first, groups):
        if options["json"]:
            print(json.dumps(dataclasses.asdict(group)))
            continue
        step = "-" if group.step is None else group.step
        values = (
            group.group_index, group.state, step, group.num_samples, group.payload_bytes, group.attempt,
            group.worker_id or "-", group.reason or "-",
        )  # fmt: skip
        widths = (5, 12, 4, 7, 10, 7, 1, 1)
        print("  ".join(f"{value!s:<{width}}" for value, width in zip(values, widths, strict=True)).rstrip())


def _show(client: BufferClient, index: int) -> None:
    (stored,) = client.read_groups(group_indexes=[index])
    record = {
        "group_index": index,
        "dataset": stored.group.dataset,
        "state": stored.state,
        "step": stored.step,
        "reason": stored.reject_reason,
        "samples": [_summary(sample) for sample in stored.group.samples],
    }
    print(json.dumps(record, indent=2, ensure_ascii=False))


def _summary(sample: Sample) -> dict[str, Any]:
    try:
        validate_finished(sample)
        problem = None
    except InvalidField as error:
        problem = error.message
    prompt = sample.prompt if isinstance(sample.prompt, str) else json.dumps(sample.prompt, ensure_ascii=False)
    return {
        "index": sample.index,
        "rollout_id": sample.rollout_id,
        "status": sample.status.value,
        "reward": sample.reward,
        "tokens": len(sample.array("tokens")),
        "response_length": sample.response_length,
        "remove_sample": sample.remove_sample,
        "weight_versions": list(sample.weight_versions),
        "problem": problem,
        "prompt": prompt[:TEXT_CHARACTERS],
        "response": sample.response[:TEXT_CHARACTERS],
        "label": sample.label,
    }
