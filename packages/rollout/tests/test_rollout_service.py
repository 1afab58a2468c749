"""The service over gRPC: progress, metrics, evaluation, weight updates, failures."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from rollout_fakes import CharTokenizer, FakeBuffer, FakeEngine, prompt_groups, reverse

from slime.rollout import service as service_module
from slime.rollout.calls.jobs import RolloutJob, RunningJobs
from slime.rollout.fleet.concurrency import START
from slime.rollout.service import RolloutService
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.clients import RolloutClient, Writer
from slime.types.errors import (
    Busy,
    DeadlineExceeded,
    InvalidField,
    InvalidSetting,
    NotFound,
    StaleWriter,
    WrongState,
)
from slime.types.rpc import RpcSettings, Server
from slime.v1 import rollout_pb2_grpc

DEFAULTS = {"hf_checkpoint": "none"}


@pytest.fixture
def serve(make_state, monkeypatch):
    """serve(buffer, engines..., **settings): a client of a service over them."""
    opened = []

    def open_service(buffer: FakeBuffer, *engines: FakeEngine, **settings):
        monkeypatch.setattr(service_module, "BufferClient", lambda *args, **kwargs: buffer)
        state = make_state(*engines, **settings)
        service = RolloutService(RolloutSettings(**DEFAULTS | settings), state, "none")
        add = rollout_pb2_grpc.add_RolloutServiceServicer_to_server
        server = Server([(add, service)], RpcSettings(), service_names=["slime.v1.RolloutService"])
        client = RolloutClient(server.start(), writer=Writer("run", 1))
        opened.append((client, server))
        return client

    yield open_service
    for client, server in opened:
        client.close()
        server.stop(0)


def test_a_door_that_stands_open_is_refused_before_anything_is_loaded():
    settings = RolloutSettings(hf_checkpoint="no-such-model")
    with pytest.raises(InvalidSetting, match=r"--host 0\.0\.0\.0 requires --tls-cert"):
        service_module.serve(settings, RpcSettings(host="0.0.0.0"), buffer_address="127.0.0.1:1")


def test_generate_tells_progress_and_metrics(engine, serve):
    buffer = FakeBuffer(prompt_groups(6, 2))
    client = serve(buffer, engine, n_samples_per_prompt=2, log_passrate=True)
    seen = []
    result = client.generate(0, 4, timeout=20, on_progress=lambda done, total: seen.append((done, total)))
    assert sorted(buffer.completed) == [0, 1, 2, 3] and not buffer.leased
    assert seen[-1] == (4, 4) and [done for done, _ in seen] == sorted(done for done, _ in seen)
    metrics = result.metrics
    assert metrics["rollout/raw_reward"] == 1.0 and metrics["rollout/zero_std_ratio"] == 1.0
    assert metrics["rollout/response_lengths"] == 4 and metrics["rollout/truncated_ratio"] == 0
    assert metrics["passrate/pass@1"] == metrics["passrate/pass@2"] == 1.0
    assert metrics["perf/rollout_time"] > 0 and metrics["perf/tokens_per_second"] > 0
    assert [sample.group_index for sample in result.examples] == [0, 1, 2]


@pytest.mark.parametrize("flags", [{}, {"log_correct_samples": True}])
def test_generate_leaves_out_metrics_that_the_summaries_give(engine, serve, flags):
    client = serve(FakeBuffer(prompt_groups(2, 2)), engine, n_samples_per_prompt=2, **flags)
    metrics = client.generate(0, 1, timeout=20, summary_metrics=False).metrics
    assert metrics["perf/rollout_time"] > 0
    # Summaries have no log-probs, from which the entropy of correct samples follows.
    assert ("rollout/raw_reward" in metrics) == ("rollout/correct_entropy" in metrics) == bool(flags)


def test_a_tuned_limit_is_among_the_metrics(engine, serve):
    engine.loads = {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0, "token_usage": 0.0}]}
    client = serve(FakeBuffer(prompt_groups(2, 1)), engine, rollout_tune_concurrency=True)
    assert client.generate(0, 1, timeout=20).metrics["rollout/concurrency"] == START
    client = serve(FakeBuffer(prompt_groups(2, 1)), engine)
    assert "rollout/concurrency" not in client.generate(0, 1, timeout=20).metrics


def test_a_resumed_step_leases_no_more_groups_than_it_lacks(engine, serve):
    buffer = FakeBuffer(prompt_groups(6, 1))
    result = serve(buffer, engine, rollout_batch_size=4).generate(0, 2, timeout=20)
    assert sorted(buffer.completed) == [0, 1] and result.metrics["rollout/aborted_groups"] == 0


def test_generate_refuses_nonsense(engine, serve):
    with pytest.raises(InvalidField, match="num_groups"):
        serve(FakeBuffer([]), engine).generate(0, 0, timeout=60)


def test_evaluation_repeats_itself_and_stores_nothing(engine, serve):
    sets = {"held_out": prompt_groups(5, 1), "other": prompt_groups(2, 1)}
    buffer = FakeBuffer([], evaluation=sets)
    engine.answer = lambda ids, params: reverse(ids, params) if params["sampling_seed"] % 2 else [2, 2, 2, 2, 2]
    client = serve(buffer, engine, n_samples_per_eval_prompt=4, eval_temperature=0.5, log_passrate=True)
    first, second = client.evaluate(0, timeout=20), client.evaluate(9, timeout=20)
    assert first.metrics.keys() >= {"eval/held_out", "eval/held_out-pass@4", "eval/other-truncated_ratio"}
    assert 0 < first.metrics["eval/held_out"] < 1
    times = {"perf/eval_time"}
    assert {k: v for k, v in first.metrics.items() if k not in times} == {
        k: v for k, v in second.metrics.items() if k not in times
    }
    assert {params["temperature"] for r in engine.requests for params in r["sampling_params"]} == {0.5}
    assert [sample.index for sample in first.examples] == [0, 4, 8, 0, 4], "one of each of the first prompts"
    only = client.evaluate(0, names=["other"], timeout=20)
    assert "eval/held_out" not in only.metrics
    with pytest.raises(NotFound, match="no evaluation set 'nope'; the buffer has held_out, other"):
        client.evaluate(0, names=["nope"], timeout=20)


def test_each_evaluation_set_is_sampled_as_it_says(engine, serve):
    buffer = FakeBuffer([], evaluation={"greedy": prompt_groups(3, 1), "sampled": prompt_groups(2, 1)})
    client = serve(
        buffer,
        engine,
        eval_temperature=0.5,
        log_passrate=True,
        eval_overrides={"greedy": {"temperature": 0}, "sampled": {"n_samples_per_eval_prompt": 4, "top_k": 5}},
    )
    metrics = client.evaluate(0, timeout=20).metrics
    seen = [(p["temperature"], p["top_k"]) for r in engine.requests for p in r["sampling_params"]]
    assert sorted(seen) == [(0.0, -1)] * 3 + [(0.5, 5)] * 8
    assert "eval/sampled-pass@4" in metrics and "eval/greedy-pass@4" not in metrics


def test_each_evaluation_set_is_generated_and_scored_as_it_says(engine, serve, tmp_path):
    plugins = tmp_path / "mine.py"
    plugins.write_text(
        "async def half(args, sample, **kwargs):\n    return 0.5\n\n"
        "async def generate(args, sample, sampling_params):\n"
        "    sample.tokens, sample.response, sample.response_length = [3, 4], 'no', 1\n"
        "    sample.rollout_log_probs, sample.status = [-0.1], sample.Status.COMPLETED\n"
        "    return sample\n"
    )
    sets = {"plain": prompt_groups(2, 1), "exact": prompt_groups(2, 1), "own": prompt_groups(2, 1)}
    overrides = {
        "exact": {"rm_type": "exact_partial", "stop": [">"]},
        "own": {"custom_generate_function_path": f"{plugins}:generate", "rm_type": "exact_partial"},
    }
    client = serve(FakeBuffer([], evaluation=sets), engine, custom_rm_path=f"{plugins}:half", eval_overrides=overrides)
    metrics = client.evaluate(0, timeout=20).metrics
    assert (metrics["eval/plain"], metrics["eval/exact"], metrics["eval/own"]) == (0.5, 1.0, 0.0)
    assert sorted(params.get("stop", []) for r in engine.requests for params in r["sampling_params"]) == [
        [],
        [],
        [">"],
        [">"],
    ]


@pytest.mark.parametrize(
    ("line", "returned"),
    [("sample.reward = '1'", "'1'"), ("sample.status = sample.Status.ABORTED", "None"), ("sample.reward = {}", "{}")],
)
def test_a_reward_that_is_none_names_set_and_sample(engine, serve, tmp_path, line, returned):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "async def generate(args, sample, sampling_params):\n"
        "    sample.tokens, sample.response, sample.response_length = [3, 4], 'no', 1\n"
        "    sample.rollout_log_probs, sample.status = [-0.1], sample.Status.COMPLETED\n"
        f"    {line}\n"
        "    return sample\n"
    )
    sets = {"own": prompt_groups(2, 1)}
    client = serve(FakeBuffer([], evaluation=sets), engine, custom_generate_function_path=str(plugin))
    with pytest.raises(InvalidField, match=f"evaluation set own returned {returned} for sample 0"):
        client.evaluate(0, timeout=20)


def test_segments_of_an_evaluation_are_scored_by_its_own_key(engine, serve, tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "import copy\n\n"
        "async def generate(args, sample, sampling_params):\n"
        "    sample.tokens, sample.response, sample.response_length = [3, 4], 'no', 1\n"
        "    sample.rollout_log_probs, sample.status = [-0.1], sample.Status.COMPLETED\n"
        "    return [sample, copy.deepcopy(sample)]\n\n"
        "async def score(args, samples, **kwargs):\n"
        "    return [{'right': 0.25} for _ in samples]\n"
    )
    client = serve(
        FakeBuffer([], evaluation={"own": prompt_groups(2, 1)}), engine, reward_key="score", eval_reward_key="right",
        custom_generate_function_path=f"{plugin}:generate", custom_rm_path=f"{plugin}:score",
    )  # fmt: skip
    assert client.evaluate(0, timeout=20).metrics["eval/own"] == 0.25


def test_only_a_weight_update_tells_the_key_of_an_engine(engine, serve):
    engine.api_key = "secret"
    client = serve(FakeBuffer([]), engine)
    assert [found.api_key for found in client.status().engines] == [""]
    (found,) = client.begin_weight_update(1)
    assert found.api_key == "secret" and "secret" not in repr(found)


def test_a_weight_update_is_a_transaction(engine, serve):
    client = serve(FakeBuffer(prompt_groups(4, 1)), engine)
    (member,) = client.begin_weight_update(1)
    assert member.url == engine.url and engine.paused
    with pytest.raises(WrongState, match="weight update 1 is open"):
        client.begin_weight_update(2)
    with pytest.raises(InvalidField, match="weight_version: got 1, but engine fake-0 holds weight version 0"):
        client.commit_weight_update(1)
    engine.version = "1"
    client.commit_weight_update(1)
    client.commit_weight_update(1)
    assert not engine.paused
    status = client.status()
    assert status.weight_version == 1 and status.engines[0].healthy
    assert client.generate(0, 1, timeout=60).metrics["rollout/weight_version_min"] == 1
    with pytest.raises(WrongState, match="weight update 5 is not open"):
        client.commit_weight_update(5)


def test_after_an_abort_nothing_serves_until_the_next_commit(engine, serve):
    client = serve(FakeBuffer(prompt_groups(4, 1)), engine)
    client.begin_weight_update(1)
    client.abort_weight_update(1, "the trainer died")
    assert not client.status().engines[0].healthy
    with pytest.raises(WrongState, match="the trainer died"):
        client.generate(0, 1, timeout=60)
    client.begin_weight_update(2)
    engine.version = "2"
    client.commit_weight_update(2)
    client.generate(0, 1, timeout=60)


def test_requests_wait_while_weights_change_and_begin_waits_for_running_ones(engine, serve):
    groups = prompt_groups(2, 1)
    buffer = FakeBuffer(groups)
    client = serve(buffer, engine, rollout_weight_update_wait_seconds=0.2)
    client.begin_weight_update(1)
    finished = []
    thread = threading.Thread(target=lambda: finished.append(client.generate(0, 1, timeout=20)))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and not engine.requests
    engine.version = "1"
    client.commit_weight_update(1)
    thread.join(120)
    assert finished[0].metrics["rollout/weight_version_max"] == 1


def test_an_older_incarnation_is_refused_and_a_newer_one_takes_over(engine, serve):
    buffer = FakeBuffer(prompt_groups(4, 1))
    client = serve(buffer, engine)
    client.begin_weight_update(1)
    client.writer = buffer.run = Writer("run", 2)
    client.begin_weight_update(7)
    client.writer = Writer("run", 1)
    with pytest.raises(StaleWriter, match="incarnation 1 is over"):
        client.commit_weight_update(1)
    with pytest.raises(StaleWriter):
        client.generate(0, 1, timeout=60)


@pytest.mark.parametrize("stray", [Writer("run", 2**60), Writer("other", 1), Writer("run", 0)])
def test_a_writer_that_the_buffer_does_not_know_locks_nobody_out(engine, serve, stray):
    client = serve(FakeBuffer(prompt_groups(4, 1)), engine)
    for _ in range(2):
        client.writer = stray
        with pytest.raises(StaleWriter):
            client.generate(0, 1, timeout=60)
        with pytest.raises(StaleWriter):
            client.begin_weight_update(1)
        client.writer = Writer("run", 1)
        client.generate(0, 1, timeout=60)


def test_a_cancelled_call_gives_the_groups_back(engine, serve):
    groups = prompt_groups(2, 1)
    buffer = FakeBuffer(groups)
    client = serve(buffer, engine, rollout_batch_size=2)
    engine.held_prompts = {tuple(CharTokenizer().encode(group.samples[0].prompt)) for group in groups}
    returned = threading.Event()
    give_back = buffer.return_group

    def watch(token, samples=()):
        give_back(token, samples)
        if len(buffer.returned) == 2:
            returned.set()

    buffer.return_group = watch  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceeded):
        client.generate(0, 2, timeout=1)
    assert returned.wait(10), "the service noticed that nobody waits"
    assert not buffer.leased and not buffer.completed


def test_calls_that_run_leave_threads_for_others():
    fleet, call = SimpleNamespace(error=None, on_failure=lambda put: lambda: None), SimpleNamespace()
    call.add_callback = lambda cancel: True
    jobs, release = RunningJobs(most=1), threading.Event()

    def work():
        first.call.advance()
        assert release.wait(60)
        return "done"

    first = RolloutJob(fleet, 0, 1, work)
    events = jobs.run(first, call)
    assert next(events).done == 1 and jobs.count == 1
    with pytest.raises(Busy, match="1 rollout is running already"):
        next(jobs.run(RolloutJob(fleet, 1, 1, lambda: None), call))
    release.set()
    assert [event.value for event in events] == ["done"] and jobs.count == 0
    assert [event.value for event in jobs.run(RolloutJob(fleet, 1, 1, lambda: "next"), call)] == ["next"]
