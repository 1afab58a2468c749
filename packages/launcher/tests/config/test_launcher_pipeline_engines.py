"""Engines with pipeline stages take weights from a directory, and by no other way."""

from pathlib import Path

import pytest

from slime.launcher.config import run_config
from slime.types.errors import InvalidSetting


@pytest.mark.parametrize("transport", [[], ["--update-weight-transport", "nccl"], ["--update-weight-transport", "ipc"]])
def test_pipeline_stages_are_refused_where_weights_go_from_gpu_to_gpu(tmp_path: Path, transport: list[str]) -> None:
    base = ["--hf-checkpoint", str(tmp_path), "--prompt-data", "prompts.jsonl", "--num-rollout", "1"]
    engines = ["--rollout-engine", "sglang", "--rollout-num-gpus-per-engine", "2", "--sglang-pp-size", "2"]
    colocate = ["--colocate"] if "ipc" in transport else []
    with pytest.raises(InvalidSetting, match="--sglang-pp-size 2 requires --update-weight-transport disk") as caught:
        run_config.parse([*base, *engines, *transport, *colocate], check=False)
    assert caught.value.field == "--sglang-pp-size"
    disk = ["--update-weight-transport", "disk", "--update-weight-disk-dir", str(tmp_path)]
    assert run_config.parse([*base, *engines, *disk], check=False).rollout.sglang_args["pp_size"] == 2
