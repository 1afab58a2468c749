"""Workers and a trainer that keep working while a test kills the server or its database."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from buffer_samples import finish

from slime.types.clients import BufferClient
from slime.types.errors import DeadlineExceeded, LeaseLost, Unavailable
from slime.types.rpc import RpcSettings

GROUPS_PER_STEP = 4
LEASE_SECONDS = 3.0
PATIENT = RpcSettings(retry_seconds=60.0)


@contextmanager
def buffer_process(*flags: str) -> Iterator[subprocess.Popen[str]]:
    """Starts `slime-buffer serve`, which may stand by for a long time; kills it at the end."""
    command = [sys.executable, "-m", "slime.buffer.cli", "serve", *flags]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def listening(process: subprocess.Popen[str]) -> str:
    """Returns the address of a process, once it listens."""
    assert process.stdout is not None and process.stderr is not None
    words = process.stdout.readline().split()
    assert words[:2] == ["listening", "on"], process.stderr.read()
    return words[2]


def train_everything(
    address: str, prompts: int, disturb: Callable[[int], None], *, every: int, workers: int = 3
) -> None:
    """Trains on all of `prompts` groups, and asserts that none is lost and none is trained on twice.

    disturb: called after each `every` steps with their number. Some workers complete their groups in one call.
    """
    with BufferClient(address, settings=PATIENT) as client:
        client.open_run("run")
        client.add_prompts([f"prompt {number}" for number in range(prompts)], key="all")
        writer = client.writer
    over = threading.Event()
    errors: list[BaseException] = []

    def work(together: bool) -> None:
        try:
            with BufferClient(address, writer, settings=PATIENT) as client:
                while not over.is_set():
                    # The leases of an answer that broke off expire, and a lease may expire during an outage.
                    with suppress(Unavailable, DeadlineExceeded, LeaseLost):
                        leased = client.lease_groups(2, ttl_seconds=LEASE_SECONDS, wait_seconds=0.2)
                        groups = [
                            (lease.token, finish(lease.group.samples, lease.group.group_index)) for lease in leased
                        ]
                        if together:
                            client.complete_groups(groups)
                        else:
                            for token, samples in groups:
                                client.complete_group(token, samples)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=[number % 2 == 0]) for number in range(workers)]
    for thread in threads:
        thread.start()
    trained: Counter[int] = Counter()
    try:
        with BufferClient(address, writer, settings=PATIENT) as client:
            for step in range(prompts // GROUPS_PER_STEP):
                sealed = client.seal_step(step, GROUPS_PER_STEP, wait_seconds=60)
                samples = list(client.read_step(step, range(len(sealed))))
                assert [sample.reward for sample in samples] == [sample.group_index for sample in samples]
                client.acknowledge_step(step)
                trained.update(sample.group_index for sample in samples)
                if (step + 1) % every == 0 and not errors:
                    disturb(step + 1)
            client.commit_steps(prompts // GROUPS_PER_STEP - 1)
            stats = client.stats()
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
        if errors:
            raise errors[0]
    assert trained == Counter(range(prompts))
    assert {state: count for state, count in stats.groups.items() if count} == {"committed": prompts}
    assert stats.damaged_payloads == 0
