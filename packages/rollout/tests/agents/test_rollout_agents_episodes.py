"""Episodes of a real agent process, with an engine, and with S3 as moto serves it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from urllib.request import Request, urlopen

import numpy as np
import pytest
import rollout_local_agent
from rollout_tiny_model import write_tiny_model

from slime.rollout.agents.rollout import generate_rollout
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.calls.event_loop import LoopThread
from slime.rollout.children.environment import search_path
from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.process import EngineProcess
from slime.rollout.fleet.fleet import Fleet
from slime.rollout.generate.state import RolloutState, flat_args, fleet_options
from slime.rollout.metrics import rollout_metrics
from slime.rollout.plugins import RolloutPlugins
from slime.rollout.prompts.tokenizer import load_tokenizer
from slime.rollout.settings.rollout import RolloutSettings
from slime.rollout.sources import EvaluationSource, MemorySource
from slime.types import Sample, SampleGroup
from slime.types.errors import EngineError

BUCKET = "results"
ARN = "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/tiny-Agent1"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}>{{ m.content }}<eos>{% else %}{{ m.content }}:{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[EngineProcess]:
    options = EmbeddedOptions(model_path=str(directory), threads=1, max_running_requests=16)
    with start_embedded(options, env={"PYTHONPATH": search_path()}) as process:
        yield process.wait_ready(120)


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def aws(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import boto3

    values = {
        "AWS_ENDPOINT_URL_S3": s3, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    yield


@pytest.fixture
def agent(aws: None) -> Iterator[str]:
    """The URL of an agent that runs."""
    command = [sys.executable, rollout_local_agent.__file__]
    environment = os.environ | {"PYTHONPATH": search_path()}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield f"http://127.0.0.1:{int(process.stdout.readline())}/invocations"
    process.kill()
    process.wait(120)
    process.stdout.close()


@dataclasses.dataclass
class Run:
    """An engine that keeps what it was asked and answered in `requests`, in order."""

    state: RolloutState
    requests: list[tuple[list[int], dict[str, Any], dict[str, Any]]]

    def train(self, tasks: list[dict[str, Any]], n: int = 1) -> tuple[list[list[list[Sample]]], dict[str, Any]]:
        source = MemorySource([{"prompt": "q", "metadata": task} for task in tasks], n)
        self.state.args.rollout_batch_size = len(tasks)
        output = generate_rollout(self.state.args, 0, source)
        assert isinstance(output, RolloutFnTrainOutput)
        assert len(source.completed) == len(tasks)
        return output.samples, output.metrics or {}  # type: ignore[return-value]


@pytest.fixture
def make_run(directory: Path, engine: EngineProcess) -> Iterator[Callable[..., Run]]:
    opened: list[Fleet] = []

    def make(arn: str, engine: EngineProcess = engine, **extra: Any) -> Run:
        settings = RolloutSettings(
            hf_checkpoint=str(directory), rollout_max_response_len=6, rollout_temperature=1.5, rm_type="random"
        )
        fleet = Fleet([engine], LoopThread(), fleet_options(settings))
        opened.append(fleet)
        fleet.start()
        requests: list[Any] = []
        generate = fleet.generate

        async def recorded(prompts: Any, params: Any, **kwargs: Any) -> Any:
            outputs = await generate(prompts, params, **kwargs)
            requests.append((prompts[0], params[0], outputs[0]))
            return outputs

        fleet.generate = recorded  # type: ignore[method-assign]
        tokenizer = load_tokenizer(str(directory))
        tokenizer.chat_template = TEMPLATE
        values = {"agent_runtime_arn": arn, "s3_bucket": BUCKET, "exp_id": "tests", "acr_timeout": 60} | extra
        args = flat_args(settings, fleet, values)
        return Run(RolloutState(args, fleet, tokenizer, RolloutPlugins(settings)), requests)

    yield make
    for fleet in opened:
        fleet.loop.run(fleet._close(), timeout=120)
        fleet.loop.stop()


def response(sample: Sample) -> np.ndarray:
    return sample.tokens[len(sample.tokens) - sample.response_length :]


def check_against_engine(run: Run, segments: list[Sample]) -> None:
    """Token ids and log-probs are the engine's, for every token that is trained on; all others have 0."""
    asked = iter(run.requests)
    for segment in segments:
        segment.validate()
        assert segment.loss_mask is not None and segment.rollout_log_probs is not None
        known: list[int] = []
        for _ in range(segment.metadata["num_turns"]):
            prompt, _, output = next(asked)
            pairs = output["meta_info"]["output_token_logprobs"]
            assert segment.tokens[: len(prompt)] == prompt
            start = len(prompt) - (len(segment.tokens) - segment.response_length)
            end = start + len(pairs)
            assert response(segment)[start:end] == [pair[1] for pair in pairs]
            np.testing.assert_array_equal(
                segment.rollout_log_probs[start:end], np.asarray([pair[0] for pair in pairs], np.float32)
            )
            known += range(start, end)
        trained = np.flatnonzero(segment.loss_mask).tolist()
        assert trained == known
        assert not np.asarray(segment.rollout_log_probs)[np.asarray(segment.loss_mask) == 0].any()
    assert next(asked, None) is None


@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize("task", ["direct", "s3"])
def test_an_episode_of_two_turns_is_what_the_engine_generated(agent, make_run, task, cumulative):
    run = make_run(agent, cumulative_token_mode=cumulative, model_id="tiny")
    (((*segments,),),), metrics = run.train([{"task": task, "question": "34", "reward": 0.5}])
    assert len(run.requests) == 2
    check_against_engine(run, segments)
    assert {sample.rollout_id for sample in segments} == {0} and {sample.reward for sample in segments} == {0.5}
    assert metrics["rollout/agents/failed"] == 0 and metrics["rollout/agents/turns"] == 2
    if cumulative:
        assert len(segments) == 1
    last = run.requests[-1][2]["meta_info"]["finish_reason"]["type"]
    assert (segments[-1].status is Sample.Status.TRUNCATED) == (last == "length")
    assert all(sample.weight_versions and sample.spans for sample in segments)
    assert all(params["temperature"] == 1.5 and params["max_new_tokens"] == 5 for _, params, _ in run.requests)
    assert segments[0].metadata["task_metadata"]["question"] == "34"


def test_a_response_ends_before_the_text_of_its_stop_token(agent, make_run):
    run = make_run(agent, cumulative_token_mode=True)
    tokenizer = run.state.tokenizer
    # Whichever token comes last is one that ends a response.
    run.state.stop_texts = {token: tokenizer.decode([token]) for token in range(len(tokenizer))}
    (((*segments,),),), _ = run.train([{"task": "direct", "question": "34"}])
    check_against_engine(run, segments)
    for segment in segments:
        assert segment.response + tokenizer.decode([segment.tokens[-1]]) == tokenizer.decode(list(response(segment)))


def test_the_payload_is_that_of_the_protocol(agent, make_run, s3):
    import boto3

    (((sample, *_),),), _ = make_run(agent, exp_id="exp", model_id="tiny").train([{"task": "s3", "question": "5"}])
    session = sample.metadata["gateway_session_id"]
    stored = boto3.client("s3").get_object(Bucket=BUCKET, Key=f"exp/{session}/{session}.json")["Body"].read()
    payload = json.loads(stored)["payload"]
    own = payload.pop("_rollout")
    assert payload == {"task": "s3", "question": "5"}
    assert own.pop("base_url").endswith(f"/sessions/{session}/v1")
    assert own == {
        "exp_id": "exp", "input_id": session, "s3_bucket": BUCKET, "model_id": "tiny",
        "sampling_params": {"temperature": 1.5, "top_p": 1.0, "max_tokens": 6},
    }  # fmt: skip


def check_failed(segments: list[Sample], reason: str) -> None:
    (sample,) = segments
    assert sample.status is Sample.Status.FAILED and reason in sample.metadata["episode_error"]
    assert sample.reward is None and sample.remove_sample and sample.effective_response_length == 0
    sample.validate()


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("error", "500: it broke"),
        ("refuse", "answered 500"),
        ("no_reward", "rewards: got None"),
        ("idle", "no request to the model"),
        ("die", "is gone"),
    ],
)
def test_an_agent_that_fails_is_a_failed_sample(agent, make_run, task, reason):
    (((*segments,),),), metrics = make_run(agent).train([{"task": task}])
    check_failed(segments, reason)
    assert metrics["rollout/agents/failed"] == 1


def test_an_agent_that_leaves_nothing_fails_at_the_deadline(agent, make_run):
    (((*segments,),),), _ = make_run(agent, acr_timeout=1.5).train([{"task": "silent"}])
    check_failed(segments, "no result in 1.5 s")


def test_no_agent_at_all_is_a_failure(aws, make_run):
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        port = server.server_port
    (((*segments,),),), _ = make_run(f"http://127.0.0.1:{port}/invocations").train([{"task": "s3"}])
    check_failed(segments, "is gone")


def test_a_missing_bucket_fails_long_before_the_deadline(agent, make_run):
    (((*segments,),),), _ = make_run(agent, s3_bucket="nowhere").train([{"task": "s3"}])
    check_failed(segments, "NoSuchBucket")


def test_of_a_list_of_rewards_the_last_counts(agent, make_run):
    (((sample, *_),),), _ = make_run(agent).train([{"task": "list"}])
    assert sample.reward == 0.25


def test_a_failed_episode_leaves_the_statistics_of_its_group_alone(agent, make_run):
    run = make_run(agent, max_concurrent=1)
    groups, metrics = run.train([{"task": "direct", "reward": 0.5}, {"task": "error"}], n=2)
    flat = [[sample for episode in group for sample in episode] for group in groups]
    numbers = rollout_metrics(flat, run.state.args)
    assert numbers["rollout/raw_reward"] == 0.5 and 0 < numbers["rollout/failed_ratio"] < 1
    assert metrics["rollout/agents/episodes"] == 4 and metrics["rollout/agents/failed"] == 2


class Sets:
    """The calls of a buffer that an evaluation makes."""

    def stats(self) -> Any:
        return type("Stats", (), {"evaluation_sets": ("held_out", "other")})

    def read_evaluation_set(self, name: str) -> list[SampleGroup]:
        tasks = [{"task": "direct", "reward": 1.0}, {"task": "direct", "reward": 0.0}, {"task": "refuse"}]
        return [SampleGroup(i, name, [Sample(group_index=i, prompt="q", metadata=t)]) for i, t in enumerate(tasks)]


def test_an_evaluation_answers_for_each_prompt_of_its_sets(agent, make_run):
    run = make_run(agent, eval_datasets=["held_out"])
    output = generate_rollout(run.state.args, 0, EvaluationSource(Sets()), evaluation=True)
    assert isinstance(output, RolloutFnEvalOutput) and list(output.data) == ["held_out"]
    result = output.data["held_out"]
    assert result["rewards"] == [1.0, 0.0, 0.0] and len(result["samples"]) == len(result["truncated"]) == 3
    assert output.metrics == {
        "eval/held_out": pytest.approx(1 / 3), "eval/held_out-accuracy": pytest.approx(1 / 3),
        "eval/held_out-n_samples": 3, "eval/held_out-failed": 1,
    }  # fmt: skip


def test_a_rollout_and_an_evaluation_share_the_gateway(agent, make_run):
    run = make_run(agent)
    run.state.args.rollout_batch_size = 4
    source = MemorySource([{"prompt": "q", "metadata": {"task": "direct"}}] * 4, 1)
    with ThreadPoolExecutor(2) as pool:
        training = pool.submit(generate_rollout, run.state.args, 0, source)
        evaluation = pool.submit(generate_rollout, run.state.args, 0, EvaluationSource(Sets()), evaluation=True)
        assert training.result(60).metrics["rollout/agents/failed"] == 0
        assert evaluation.result(60).metrics["eval/other-failed"] == 1


def test_a_dead_engine_that_is_not_started_again_ends_the_rollout(directory, agent, make_run):
    options = EmbeddedOptions(model_path=str(directory), threads=1)
    with start_embedded(options, env={"PYTHONPATH": search_path()}) as process:
        run = make_run(agent, engine=process.wait_ready(120))
        run.state.fleet.restarts = None
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="embedded-0"):
            run.train([{"task": "s3"}])


@pytest.fixture
def agentcore(agent: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """AWS's side of AgentCore: the calls that came, as (operation, session); invocations go to the agent."""
    calls: list[tuple[str, str]] = []

    class Service(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            header = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"
            session = self.headers[header]
            operation = self.path.split("?")[0].rsplit("/", 1)[1]
            assert ARN in unquote(self.path)
            calls.append((operation, session))
            answer = b"{}"
            if operation == "invocations":
                request = Request(agent, body, {"Content-Type": "application/json", header: session})
                with urlopen(request, timeout=30) as response:
                    answer = response.read()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: Any) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL_BEDROCK_AGENTCORE", f"http://127.0.0.1:{server.server_port}")
    yield calls
    server.shutdown()
    server.server_close()
    thread.join(120)


@pytest.mark.parametrize("task", ["s3", "silent"])
def test_agentcore_is_invoked_once_and_its_session_ended(agentcore, make_run, task):
    run = make_run(ARN, acr_timeout=60 if task == "s3" else 4)
    (((*segments,),),), _ = run.train([{"task": task}])
    session = segments[0].metadata["gateway_session_id"]
    assert agentcore == [("invocations", session), ("stopruntimesession", session)]
    if task == "s3":
        check_against_engine(run, segments)
        assert segments[0].reward == 1.0
    else:
        check_failed(segments, "no result in 4 s")
