"""Settings of agents, read from the file of `--custom-config-path` or from environment variables."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from slime.rollout.chat.syntaxes.registry import AnswerSyntax
from slime.types.errors import InvalidSetting

RENDERERS = ("auto", "qwen")
STRATEGIES = ("grpo", "identity")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
ARN = re.compile(r"arn:[\w-]+:bedrock-agentcore:([a-z0-9-]+):\d*:runtime/\S+")

ENVIRONMENT = {
    "agent_runtime_arn": "ACR_AGENT_RUNTIME_ARN",
    "s3_bucket": "ACR_S3_BUCKET",
}
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """Settings of agents.

    agent_runtime_arn: the ARN of an AgentCore runtime, or the URL `http://host:port/invocations` of an agent that is
    called directly.
    custom_agent_path: an agent that runs in the rollout service instead.
    s3_bucket: the bucket in which agents leave results; required with an ARN.
    exp_id: the first part of the keys of results. model_id: the name of the model that agents are told.
    acr_timeout: the most seconds that an episode may take. acr_tps_limit: the most calls of agents per second.
    max_concurrent: the most episodes at once. max_pool_connections: the most connections to each AWS service.
    reward_postprocessing: see `normalize_episode_rewards`.
    cumulative_token_mode, renderer_family: see `Renderer`.
    gateway_host: the address to listen on. gateway_port: 0 lets the system choose. gateway_url: the URL for agents,
    where that is not http://gateway_host:gateway_port. gateway_api_key_file: a file with the key that agents must send;
    required where gateway_host is not the loopback. gateway_log_level: the log level of this folder.
    sglang_tool_call_parser, sglang_reasoning_parser: SGLang's names of the syntaxes of the model's answers.
    """

    agent_runtime_arn: str = ""
    custom_agent_path: str | None = None
    s3_bucket: str | None = None
    exp_id: str = "slime"
    gateway_host: str = "127.0.0.1"
    gateway_url: str | None = None
    gateway_port: int = 0
    gateway_api_key_file: str | None = None
    acr_timeout: float = 900.0
    model_id: str = "default"
    acr_tps_limit: float = 25.0
    max_concurrent: int = 100
    max_pool_connections: int = 10
    reward_postprocessing: str = "grpo"
    cumulative_token_mode: bool = False
    renderer_family: str = "auto"
    gateway_log_level: str = "warning"
    sglang_tool_call_parser: str | None = None
    sglang_reasoning_parser: str | None = None

    @property
    def region(self) -> str | None:
        """The AWS region of the ARN; None for an agent that is called directly."""
        match = ARN.fullmatch(self.agent_runtime_arn)
        return match.group(1) if match else None

    @property
    def syntax(self) -> AnswerSyntax:
        return AnswerSyntax(self.sglang_tool_call_parser, self.sglang_reasoning_parser)

    @classmethod
    def from_args(cls, args: object) -> AgentSettings:
        """Reads each setting from the attribute of `args`, else from the environment (ACR_AGENT_RUNTIME_ARN,
        ACR_S3_BUCKET, the others by their names in capitals), else takes its default.

        An agent in the rollout service has cumulative_token_mode as its default. Raises InvalidSetting.
        """
        values = {}
        for field in dataclasses.fields(cls):
            value = given(args, field.name)
            if value is not None:
                values[field.name] = _typed(field.name, field.type, value)
        if "custom_agent_path" in values:
            values.setdefault("cumulative_token_mode", True)
        elif "agent_runtime_arn" not in values:
            raise InvalidSetting.required(
                "agent_runtime_arn", "an ARN of bedrock-agentcore, or http://host:port/invocations"
            )
        if "exp_id" not in values and (run_name := getattr(args, "run_name", None)):
            values["exp_id"] = str(run_name)
        settings = cls(**values)
        settings._check()
        return settings

    def _check(self) -> None:
        url = urlsplit(self.agent_runtime_arn)
        remote = self.custom_agent_path is None
        if remote and self.region is None and not (url.scheme in ("http", "https") and url.hostname):
            expected = "arn:aws:bedrock-agentcore:REGION:ACCOUNT:runtime/NAME, or http://host:port/invocations"
            raise InvalidSetting.must_be("agent_runtime_arn", expected, got=self.agent_runtime_arn)
        if self.region is not None and not self.s3_bucket:
            raise InvalidSetting.requires(
                f"agent_runtime_arn {self.agent_runtime_arn}", "s3_bucket", "the agent leaves its results there"
            )
        for name in ("acr_timeout", "acr_tps_limit"):
            if not getattr(self, name) > 0:
                raise InvalidSetting.must_be(name, "greater than 0", got=getattr(self, name))
        for name in ("max_concurrent", "max_pool_connections"):
            if getattr(self, name) < 1:
                raise InvalidSetting.must_be(name, "at least 1", got=getattr(self, name))
        if not 0 <= self.gateway_port <= 65535:
            raise InvalidSetting.must_be(
                "gateway_port", "a port, or 0 to let the system choose one", got=self.gateway_port
            )
        if self.gateway_host in ("0.0.0.0", "::") and not self.gateway_url:
            raise InvalidSetting.requires(
                f"gateway_host {self.gateway_host}", "gateway_url URL", "agents reach the gateway there"
            )
        # Imported late: reading flags imports this module, and should not wait for gRPC to load.
        from slime.types.rpc.token_files import is_loopback

        if self.gateway_api_key_file is None and not is_loopback(self.gateway_host):
            raise InvalidSetting.requires(
                f"gateway_host {self.gateway_host}", "gateway_api_key_file FILE", "others can reach the gateway"
            )
        _one_of("renderer_family", self.renderer_family, RENDERERS)
        _one_of("reward_postprocessing", self.reward_postprocessing, STRATEGIES)
        _one_of("gateway_log_level", self.gateway_log_level, LOG_LEVELS)
        self.syntax.check("agents have no such parser")

    def set_log_level(self) -> None:
        logging.getLogger("slime.rollout.agents").setLevel(self.gateway_log_level.upper())


def given(args: object, name: str, environ: Mapping[str, str] | None = None) -> Any:
    """Returns the attribute `name` of `args`, else its environment variable, else None."""
    value = getattr(args, name, None)
    if value is not None:
        return value
    return (os.environ if environ is None else environ).get(ENVIRONMENT.get(name, name.upper())) or None


def _typed(name: str, kind: Any, value: Any) -> Any:
    text = str(value).strip()
    if kind == "bool":
        if text.lower() not in (*TRUE, *FALSE):
            raise InvalidSetting.must_be(name, "true or false", got=value)
        return text.lower() in TRUE
    if kind in ("int", "float"):
        try:
            number = float(text)
        except ValueError:
            raise InvalidSetting.must_be(name, "a number", got=value) from None
        if not math.isfinite(number):
            raise InvalidSetting.must_be(name, "a finite number", got=value)
        if kind == "int" and number != int(number):
            raise InvalidSetting.must_be(name, "an integer", got=value)
        return int(number) if kind == "int" else number
    return text


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidSetting.one_of(name, known, got=value)
