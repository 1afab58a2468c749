"""`--data-source-path`: what a class of the user's gives is generated, completed, and given back to it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rollout_fakes import FakeBuffer, FakeEngine

from slime.rollout import service as service_module
from slime.rollout.recordings.rollouts import write_rollout
from slime.rollout.service import RolloutService
from slime.rollout.settings.rollout import RolloutSettings
from slime.rollout.sources.own import OwnLeases, OwnSource
from slime.types import Sample, SampleGroup
from slime.types.clients import RolloutClient, Writer
from slime.types.errors import InvalidFile, MissingFile, PluginError
from slime.types.rpc import RpcSettings, Server
from slime.v1 import rollout_pb2_grpc

SOURCE = '''
from slime.types import Sample

class Digits:
    """Counts up; what comes back is given first."""

    def __init__(self, args):
        self.args, self.next, self.back, self.calls = args, 0, [], []

    def get_samples(self, n):
        taken, self.back = self.back[:n], self.back[n:]
        while len(taken) < n:
            prompt = f"{self.next:03d}>"
            taken.append([Sample(prompt=prompt, label=prompt[2::-1], metadata={"turn": i}) for i in range(2)])
            self.next += 1
        return taken

    def add_samples(self, groups):
        self.back += groups

    def save(self, rollout_id):
        self.calls.append(("save", rollout_id, self.args.save))

    def load(self, rollout_id=None):
        self.calls.append(("load", rollout_id, self.args.load))

    def __len__(self):
        return 1000

class NotOne:
    def __init__(self, args):
        pass

class Broken:
    def __init__(self, args):
        raise ValueError("no such database")
'''


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "digits.py").write_text(SOURCE)
    return f"{tmp_path}/digits.py"


def leases(buffer: FakeBuffer, own: OwnSource) -> OwnLeases:
    return OwnLeases(buffer, own, group_size=2, worker_id="test", wait_seconds=0.1)


def test_groups_are_the_classes_own_samples(path: str) -> None:
    own = OwnSource.open(f"{path}:Digits", SimpleNamespace())
    buffer = FakeBuffer([], samples_each=2)
    with leases(buffer, own) as source:
        first, second = source.get_samples(2)
        assert [sample.metadata["turn"] for sample in first] == [0, 1], "not copies of one template"
        assert [sample.index for sample in (*first, *second)] == [0, 1, 2, 3]
        assert len(source) == 1000 and source.next == 2, "what a rollout function finds on its data source"
        first[0].response = "half"
        source.give_back([first])
        source.reject(second, "too_long")
    with leases(buffer, own) as source:
        again, new = source.get_samples(2)
        assert (again[0].prompt, again[0].response) == ("000>", "") and new[0].prompt == "002>"
        assert again[1].metadata == {"turn": 1}
        again[0].response = "half"
        source.add_samples([again])
        (back,) = source.get_samples(1)
        assert back[0].response == "half" and back[0].group_index not in (0, None), "it came through the class"
    assert buffer.rejected == [(1, "too_long"), (0, "returned to the data source")]


def test_single_samples_have_the_labels_of_their_dataset_in_every_copy() -> None:
    class Prompts:
        def fill_labels(self, samples: list[Sample]) -> None:
            for sample in samples:
                sample.label = sample.prompt.upper()

    given = SimpleNamespace(dataset=Prompts(), get_samples=lambda n: [Sample(prompt=p) for p in "ab"[:n]])
    groups = OwnSource(given, "mine", SimpleNamespace()).take(2, 2)
    assert [[sample.label for sample in group] for group in groups] == [["A", "A"], ["B", "B"]]


def test_what_is_no_data_source_is_refused(path: str) -> None:
    with pytest.raises(PluginError, match="a NotOne has no get_samples"):
        OwnSource.open(f"{path}:NotOne", SimpleNamespace())
    with pytest.raises(PluginError, match="making it raised ValueError: no such database"):
        OwnSource.open(f"{path}:Broken", SimpleNamespace())
    own = OwnSource.open(f"{path}:Digits", SimpleNamespace())
    for answer, words in ((None, "a NoneType|NoneType"), ([[]], "a group of 0"), ([1], "a int"), ([[1, 2]], "a list")):
        own.source.get_samples = lambda n, answer=answer: answer
        with pytest.raises(PluginError, match=words):
            own.take(1, 2)


@pytest.fixture
def client(make_state: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    opened: list[Any] = []

    def open_service(buffer: FakeBuffer, engine: FakeEngine, extra: dict[str, Any], **settings: Any) -> Any:
        monkeypatch.setattr(service_module, "BufferClient", lambda *args, **kwargs: buffer)
        state = make_state(engine, n_samples_per_prompt=2, **settings)
        for name, value in extra.items():
            setattr(state.args, name, value)
        service = RolloutService(
            RolloutSettings(hf_checkpoint="none", n_samples_per_prompt=2, **settings), state, "none"
        )
        add = rollout_pb2_grpc.add_RolloutServiceServicer_to_server
        server = Server([(add, service)], RpcSettings(), service_names=["slime.v1.RolloutService"])
        client = RolloutClient(server.start(), writer=Writer("run", 1))
        opened.append((client, server))
        return client, service

    yield open_service
    for client, server in opened:
        client.close()
        server.stop(0)


def test_a_service_generates_from_it_and_has_it_save_and_load(client: Any, engine: FakeEngine, path: str) -> None:
    buffer = FakeBuffer([], samples_each=2)
    extra = {"save_interval": 2, "checkpoint_dir": "out/checkpoints", "load_root": "out"}
    calls, service = client(buffer, engine, extra, data_source_path=f"{path}:Digits")
    for rollout_id in (3, 4, 5, 6):
        metrics = calls.generate(rollout_id, 2, timeout=120).metrics
    assert metrics["rollout/raw_reward"] == 1.0
    assert [group[0].prompt for _, group in sorted(buffer.completed.items())] == [f"{i:03d}>" for i in range(8)]
    assert service._own_source.source.calls == [
        ("load", 2, "out"),
        *(("save", rollout_id, "out/checkpoints") for rollout_id in (3, 4, 5, 6)),
    ], "the state before the first rollout, and after each that a checkpoint may follow"


def test_recorded_samples_stand_in_for_generated_ones(client: Any, engine: FakeEngine, tmp_path: Path) -> None:
    def recorded(number: int, size: int = 2) -> SampleGroup:
        samples = [
            Sample(prompt="1>", tokens=[3, 4, 5], response="2", response_length=2, reward=float(i), index=90 + i,
                   group_index=70 + number, rollout_log_probs=[-0.1, -0.2], status=Sample.Status.COMPLETED)
            for i in range(size)
        ]  # fmt: skip
        return SampleGroup(70 + number, samples=samples)

    write_rollout(tmp_path / "0", 0, [recorded(0), recorded(1), recorded(2)])
    write_rollout(tmp_path / "1", 1, [recorded(0)])
    write_rollout(tmp_path / "2", 2, [recorded(0, 3), recorded(1, 3)])
    buffer = FakeBuffer([], samples_each=2)
    buffer.add_prompts([{"prompt": "7>"}] * 6)
    calls, _ = client(buffer, engine, {}, load_forge_rollout_data=str(tmp_path / "{rollout_id}"))
    calls.generate(0, 2, timeout=120)
    assert not engine.requests and sorted(buffer.completed) == [0, 1]
    assert [sample.index for group in buffer.completed.values() for sample in group] == [0, 1, 2, 3]
    assert [sample.reward for sample in buffer.completed[1]] == [0.0, 1.0]
    for rollout_id, error, words in (
        (1, InvalidFile, "got 1 group, expected at least --rollout-batch-size 2"),
        (2, InvalidFile, "got a group of 3 trajectories, expected --n-samples-per-prompt 2"),
        (3, MissingFile, "--load-forge-rollout-data: no such file"),
    ):
        with pytest.raises(error, match=words):
            calls.generate(rollout_id, 2, timeout=120)
