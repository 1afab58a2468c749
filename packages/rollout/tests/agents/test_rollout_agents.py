"""Turns to samples, rewards of episodes, and settings of remote agents."""

from __future__ import annotations

import argparse
import math
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.rollout.agents.agentcore import AgentCore
from slime.rollout.agents.merge import failed_sample, merge_turns
from slime.rollout.agents.results import aws_client
from slime.rollout.agents.rewards import normalize_episode_rewards
from slime.rollout.agents.sessions import Turn
from slime.rollout.agents.settings import AgentSettings
from slime.rollout.agents.transport import extract_reward, parse_result, result_place
from slime.types import Sample
from slime.types.errors import ConfigError, InvalidField, InvalidSetting, NotAvailable, RemoteError

URL = "http://127.0.0.1:9/invocations"
TOKENS = st.lists(st.integers(2, 50), min_size=1, max_size=6)


@st.composite
def episodes(draw: st.DrawFn) -> list[tuple[Turn, bool]]:
    """Turns, each with whether it goes on from the one before."""
    turns: list[tuple[Turn, bool]] = []
    for number in range(draw(st.integers(1, 6))):
        goes_on = number > 0 and draw(st.booleans())
        prompt = turns[-1][0].all_ids + draw(st.just([]) | TOKENS) if goes_on else [1, number, *draw(TOKENS)]
        completion = draw(TOKENS)
        log_probs = [draw(st.floats(-20, 0, width=32)) for _ in completion]
        reason = draw(st.sampled_from(["stop", "length"]))
        meta = {"finish_reason": {"type": reason}, "weight_version": str(number)}
        turns.append((Turn(prompt, completion, log_probs, meta, "x"), goes_on))
    return turns


@settings(deadline=None)
@given(episodes())
def test_merged_turns_are_the_engines_tokens_and_log_probs(made: list[tuple[Turn, bool]]) -> None:
    turns = [turn for turn, _ in made]
    samples = merge_turns(turns, Sample(index=5, group_index=2), lambda ids: "-" * len(ids))
    assert len(samples) == sum(not goes_on for _, goes_on in made)
    assert {(s.rollout_id, s.index, s.group_index) for s in samples} == {(5, 5, 2)}
    left = list(turns)
    for sample in samples:
        mine, left = left[: sample.metadata["num_turns"]], left[sample.metadata["num_turns"] :]
        assert sample.tokens == mine[-1].all_ids
        mask, log_probs = np.zeros(len(sample.tokens)), np.zeros(len(sample.tokens), np.float32)
        for turn in mine:
            at = slice(len(turn.prompt_ids), len(turn.all_ids))
            assert sample.tokens[at] == turn.completion_ids
            mask[at], log_probs[at] = 1, turn.log_probs
        start = len(mine[0].prompt_ids)
        np.testing.assert_array_equal(sample.loss_mask, mask[start:])
        np.testing.assert_array_equal(sample.rollout_log_probs, log_probs[start:])
        assert (sample.status is Sample.Status.TRUNCATED) == (mine[-1].finish_reason == "length")
        assert sample.weight_versions == [turn.weight_version for turn in mine]
        sample.validate()
    assert not left


def test_a_failed_sample_has_nothing_to_train() -> None:
    sample = failed_sample(Sample(index=3, group_index=1, prompt="p", metadata={"a": 1}), "gone")
    sample.validate()
    assert sample.status is Sample.Status.FAILED and sample.reward is None and sample.remove_sample
    assert sample.effective_response_length == 0 and sample.rollout_id == 3
    assert sample.metadata["a"] == 1 and sample.metadata["episode_error"] == "gone"


def scored(group: int, session: str, reward: float, *, failed: bool = False) -> Sample:
    sample = Sample(group_index=group, reward=reward, metadata={"gateway_session_id": session})
    if failed:
        sample.status, sample.reward = Sample.Status.FAILED, None
    return sample


def test_rewards_are_normalised_over_episodes_not_segments() -> None:
    samples = [
        scored(0, "a", 1.0), scored(0, "a", 9.0), scored(0, "b", 0.0), scored(0, "c", 0.0, failed=True),
        scored(1, "d", 0.5), scored(1, "e", 0.5), scored(-1, "f", 3.0),
    ]  # fmt: skip
    raw, rewards = normalize_episode_rewards(argparse.Namespace(grpo_std_normalization=True), samples)
    assert raw == [1.0, 1.0, 0.0, 0.0, 0.5, 0.5, 0.0]
    assert rewards == pytest.approx([0.5 / (0.5 + 1e-6)] * 2 + [-0.5 / (0.5 + 1e-6), 0, 0, 0, 0])
    _, centred = normalize_episode_rewards(argparse.Namespace(grpo_std_normalization=False), samples)
    assert centred == [0.5, 0.5, -0.5, 0.0, 0.0, 0.0, 0.0]
    _, same = normalize_episode_rewards(argparse.Namespace(reward_postprocessing="identity"), samples)
    assert same == raw
    with pytest.raises(InvalidSetting, match="reward_postprocessing"):
        normalize_episode_rewards(argparse.Namespace(reward_postprocessing="other"), samples)


def test_rewards_take_the_key_of_dict_rewards() -> None:
    samples = [Sample(group_index=0, rollout_id=i, reward={"score": i}) for i in range(2)]  # type: ignore[dict-item]
    raw, _ = normalize_episode_rewards(argparse.Namespace(reward_key="score"), samples)
    assert raw == [0.0, 1.0]


@pytest.mark.parametrize(("rewards", "expected"), [(0.5, 0.5), (True, 1.0), ("2", 2.0), ([0.0, 1.0], 1.0), ([3], 3.0)])
def test_a_reward_is_a_number_or_the_last_of_a_list(rewards: Any, expected: float) -> None:
    assert extract_reward({"rewards": rewards}) == expected


@pytest.mark.parametrize(
    "result", [{}, {"rewards": None}, {"rewards": []}, {"rewards": math.nan}, {"rewards": "x"}, {"rewards": 10**400}]
)
def test_a_missing_reward_is_an_error(result: dict[str, Any]) -> None:
    with pytest.raises(InvalidField, match="rewards"):
        extract_reward(result)


def test_an_agents_error_is_told_with_its_reason() -> None:
    with pytest.raises(RemoteError, match="500: no tool"):
        extract_reward({"status_code": 500, "stop_reason": "no tool", "rewards": 1.0})
    for status in ("²", "9" * 5000, None):
        with pytest.raises(RemoteError, match="the agent failed with"):
            extract_reward({"status_code": status, "rewards": 1.0})


@pytest.mark.parametrize("body", [b"[" * 100_000, b"\xff", b"3", b"", b'{"rewards": ' + b"9" * 5000 + b"}"])
def test_rubbish_is_no_result(body: bytes) -> None:
    with pytest.raises(RemoteError, match="agent x: got .*expected a JSON object"):
        parse_result(body, "agent x")


@pytest.mark.parametrize(
    ("name", "value"), [("max_concurrent", "inf"), ("gateway_port", "nan"), ("acr_timeout", "inf")]
)
def test_settings_are_finite(name: str, value: str) -> None:
    with pytest.raises(InvalidSetting, match=f"{name} must be a finite number, got '{value}'"):
        AgentSettings.from_args(argparse.Namespace(agent_runtime_arn=URL, **{name: value}))


def test_settings_come_from_args_then_the_environment_then_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACR_AGENT_RUNTIME_ARN", URL)
    monkeypatch.setenv("ACR_S3_BUCKET", "bucket")
    monkeypatch.setenv("GATEWAY_PORT", "9090")
    monkeypatch.setenv("CUMULATIVE_TOKEN_MODE", "true")
    monkeypatch.setenv("ACR_TIMEOUT", "12")
    settings = AgentSettings.from_args(argparse.Namespace(acr_timeout=30, run_name="run", gateway_port=None))
    assert settings == AgentSettings(
        agent_runtime_arn=URL, s3_bucket="bucket", exp_id="run", gateway_port=9090, acr_timeout=30.0,
        cumulative_token_mode=True,
    )  # fmt: skip
    assert settings.region is None and settings.gateway_host == "127.0.0.1"


def test_the_region_is_the_arns() -> None:
    arn = "arn:aws:bedrock-agentcore:eu-central-1:1:runtime/a-b"
    assert AgentSettings.from_args(argparse.Namespace(agent_runtime_arn=arn, s3_bucket="b")).region == "eu-central-1"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"agent_runtime_arn": None}, "agent_runtime_arn"),
        ({"agent_runtime_arn": "arn:aws:s3:::x"}, "agent_runtime_arn"),
        ({"agent_runtime_arn": "arn:aws:bedrock-agentcore:eu-central-1:1:runtime/a"}, "agent_runtime_arn"),
        ({"acr_timeout": 0}, "acr_timeout"),
        ({"acr_tps_limit": "fast"}, "acr_tps_limit"),
        ({"max_concurrent": 0}, "max_concurrent"),
        ({"max_pool_connections": 1.5}, "max_pool_connections"),
        ({"gateway_port": 70000}, "gateway_port"),
        ({"gateway_host": "0.0.0.0"}, "gateway_host"),
        ({"cumulative_token_mode": "maybe"}, "cumulative_token_mode"),
        ({"renderer_family": "llama"}, "renderer_family"),
        ({"reward_postprocessing": "mean"}, "reward_postprocessing"),
        ({"gateway_log_level": "loud"}, "gateway_log_level"),
    ],
)
def test_a_wrong_setting_is_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        AgentSettings.from_args(argparse.Namespace(**{"agent_runtime_arn": URL} | values))
    assert caught.value.field == named and caught.value.expected


def test_a_parser_that_is_not_there_is_refused() -> None:
    with pytest.raises(NotAvailable, match="--sglang-tool-call-parser pythonic.*qwen"):
        AgentSettings.from_args(argparse.Namespace(agent_runtime_arn=URL, sglang_tool_call_parser="pythonic"))


def test_an_invocation_is_not_tried_again_once_its_episode_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    sent: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as nobody:
        monkeypatch.setenv("AWS_ENDPOINT_URL_BEDROCK_AGENTCORE", f"http://127.0.0.1:{nobody.server_port}")
    arn = "arn:aws:bedrock-agentcore:eu-central-1:1:runtime/a-b"
    runtime = AgentCore(AgentSettings(agent_runtime_arn=arn, s3_bucket="b"))
    session_id = "s" * 36
    runtime._running.add(session_id)

    def over(request: Any, **kwargs: Any) -> None:
        sent.append(session_id)
        runtime._running.discard(session_id)

    runtime._client.meta.events.register_last("before-send.bedrock-agentcore.InvokeAgentRuntime", over)
    with pytest.raises(RemoteError, match="is over"):
        runtime._invoke(session_id, {})
    assert len(sent) == 1


def test_what_aws_would_refuse_every_time_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.exceptions import ClientError, NoCredentialsError

    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    arn = "arn:aws:bedrock-agentcore:eu-central-1:1:runtime/a-b"
    runtime = AgentCore(AgentSettings(agent_runtime_arn=arn, s3_bucket="b"))

    def answers(error: Exception) -> None:
        def invoke(**kwargs: Any) -> None:
            raise error

        monkeypatch.setattr(runtime._client, "invoke_agent_runtime", invoke)

    def refusal(code: str) -> ClientError:
        return ClientError({"Error": {"Code": code, "Message": "no"}}, "InvokeAgentRuntime")

    for error in (NoCredentialsError(), refusal("AccessDeniedException"), refusal("ResourceNotFoundException")):
        answers(error)
        with pytest.raises(ConfigError, match="runtime/a-b.*expected"):
            runtime._invoke("s", {})
    answers(refusal("ThrottlingException"))
    with pytest.raises(RemoteError, match="Throttling"):
        runtime._invoke("s", {})


def test_without_boto3_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(NotAvailable, match=r"slime-rollout\[agents\]"):
        aws_client("s3", AgentSettings(agent_runtime_arn=URL))


def test_an_agent_names_no_bucket_but_that_of_the_run_and_no_key_of_another_experiment():
    payload = {"_rollout": {"exp_id": "run", "input_id": "i"}}
    assert result_place({}, "mine", payload, "s") == ("mine", "run/i/s.json")
    own = {"s3_bucket": "mine", "result_key": "run/other.json"}
    assert result_place(own, "mine", payload, "s") == ("mine", "run/other.json")
    for answer, field in (
        ({"s3_bucket": "secrets"}, "s3_bucket"),
        ({"result_key": "keys.json"}, "result_key"),
        ({"result_key": "runs/x.json"}, "result_key"),
        ({"result_key": 7}, "result_key"),
    ):
        with pytest.raises(InvalidField, match=field):
            result_place(answer, "mine", payload, "s")
    with pytest.raises(InvalidField, match="s3_bucket: got secrets, .*none is set"):
        result_place({"s3_bucket": "secrets"}, None, payload, "s")
