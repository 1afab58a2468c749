"""Flags that name functions of the user, and settings of agents: read before anything is started."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from slime.launcher.config import run_config
from slime.launcher.config.catalogue import declared
from slime.launcher.runner.flags import AGENT_ROLLOUT
from slime.types.errors import (
    ConfigError,
    InvalidSetting,
    NotAvailable,
    PluginError,
)
from slime.types.plugin_contracts import CONTRACTS
from slime.types.setting_values import flag_name


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    model, prompts = tmp_path / "model", tmp_path / "prompts.jsonl"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    prompts.write_text('{"input": "1 + 1"}\n')
    return ["--hf-checkpoint", str(model), "--prompt-data", str(prompts), "--num-rollout", "4",
            "--n-samples-per-prompt", "2"]  # fmt: skip


def test_plugins_are_loaded_first(base: list[str], tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "async def reward(args, sample, **kwargs):\n    return 1.0\n\ndef keep(args):\n    return True\n\nDEPTH = 3\n"
    )
    assert run_config.parse([*base, "--custom-rm-path", f"{plugin}:reward"]).rollout.custom_rm_path
    for path in (f"{plugin}:keep", f"{plugin}:DEPTH", f"{plugin}:none", "no.such.module", str(tmp_path / "none.py")):
        with pytest.raises(PluginError, match="--dynamic-sampling-filter-path"):
            run_config.parse([*base, "--dynamic-sampling-filter-path", path])


def test_the_settings_of_agents_are_read_first(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ACR_AGENT_RUNTIME_ARN", "ACR_S3_BUCKET"):
        monkeypatch.delenv(name, raising=False)
    toolkit = tmp_path / "toolkit.yaml"
    words = [*base, "--rollout-function-path", AGENT_ROLLOUT, "--custom-config-path", str(toolkit)]
    toolkit.write_text("agent_runtime_arn: http://127.0.0.1:8080/invocations\n")
    assert run_config.parse(words).flat["agent_runtime_arn"]
    for text, named in (("agent_runtime_arn: agent-1", "'agent-1'"), ("exp_id: e", "agent_runtime_arn is required")):
        toolkit.write_text(text)
        with pytest.raises(InvalidSetting, match=f"agent_runtime_arn.*{named}|{named}"):
            run_config.parse(words)
    # Faults that only the rollout service would meet, minutes later.
    toolkit.write_text("agent_runtime_arn: http://127.0.0.1:8080/invocations\n")
    with pytest.raises(ConfigError, match="tool.call.parser"):
        run_config.parse([*words, "--sglang-tool-call-parser", "no-such-syntax"])
    assert run_config.parse([*words, "--sglang-tool-call-parser", "qwen25"])
    toolkit.write_text("agent_runtime_arn: arn:aws:bedrock-agentcore:us-west-2:111122223333:runtime/a\ns3_bucket: b\n")
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(NotAvailable, match=r"slime-rollout\[agents\]"):
        run_config.parse(words)


def test_experts_of_the_engine_are_replayed_for_a_mixture_of_experts_and_without_agents(
    base: list[str], tmp_path: Path
) -> None:
    model = Path(base[base.index("--hf-checkpoint") + 1])
    experts = tmp_path / "experts"
    shutil.copytree(model, experts)
    config = json.loads((model / "config.json").read_text())
    shape = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2}
    (experts / "config.json").write_text(json.dumps(config | shape))
    flag = "--use-rollout-routing-replay"
    assert run_config.parse([*base, flag, "--hf-checkpoint", str(experts)]).rollout.use_rollout_routing_replay
    with pytest.raises(InvalidSetting, match=f"{flag} requires a mixture of experts"):
        run_config.parse([*base, flag])
    toolkit = tmp_path / "toolkit.yaml"
    toolkit.write_text("agent_runtime_arn: http://127.0.0.1:8080/invocations\n")
    agents = ["--rollout-function-path", AGENT_ROLLOUT, "--custom-config-path", str(toolkit)]
    with pytest.raises(InvalidSetting, match=f"{flag} and --rollout-function-path"):
        run_config.parse([*base, *agents, flag, "--hf-checkpoint", str(experts)])


def test_every_path_of_a_plug_in_has_a_contract() -> None:
    paths = {flag_name(name) for name in declared() if name.endswith("_path")} - {"--custom-config-path"}
    assert paths == set(CONTRACTS)
