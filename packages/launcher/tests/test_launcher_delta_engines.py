"""Deltas of weights reach SGLang engines of the run, and no others."""

from pathlib import Path

import pytest

from slime.launcher.config import run_config
from slime.types.errors import InvalidSetting


def test_external_engines_get_no_pickle_of_what_to_load(tmp_path: Path) -> None:
    words = ["--hf-checkpoint", str(tmp_path), "--prompt-data", "prompts.jsonl", "--num-rollout", "1"]
    words += ["--update-weight-mode", "delta", "--update-weight-transport", "disk"]
    words += ["--update-weight-disk-dir", str(tmp_path / "shared")]
    external = ["--rollout-external-engine-addrs", "http://127.0.0.1:30000"]
    assert run_config.parse([*words, *external], check=False).rollout.rollout_external_engine_addrs
    words += ["--update-weight-local-checkpoint-dir", str(tmp_path / "local")]
    with pytest.raises(InvalidSetting, match="--rollout-external-engine-addrs cannot be used together") as caught:
        run_config.parse([*words, *external], check=False)
    assert caught.value.field == "--update-weight-local-checkpoint-dir"
