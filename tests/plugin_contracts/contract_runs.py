"""A buffer and a rollout service as a run has them, around an engine that answers every prompt of digits backwards.

Plug-ins are named by path, as on the command line. A test file is also a program that checks plug-ins of a user:

    python tests/plugin_contracts/test_plugin_rollout_contracts.py --rollout-function-path my_package.rollout.generate

under pytest the same by variables of the environment: SLIME_TEST_ROLLOUT_FUNCTION_PATH and so on.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Where pytest does not say where the tests' own modules are: this is a program as well.
sys.path.append(str(Path(__file__).resolve().parents[2] / "packages" / "rollout" / "tests" / "support"))
from rollout_fakes import VOCABULARY, FakeEngine

from slime.buffer.service import serve as serve_buffer
from slime.buffer.settings import BufferSettings
from slime.rollout.service import serve as serve_rollout
from slime.rollout.settings.rollout import RolloutSettings
from slime.types import Sample
from slime.types.clients import BufferClient, RolloutClient
from slime.types.rpc import RpcSettings

TIMEOUT = 60
PROMPTS = 16
# Flags of plug-ins that these files check for a user.
FLAGS = (
    "--rollout-function-path",
    "--eval-function-path",
    "--data-source-path",
    "--buffer-filter-path",
    "--custom-generate-function-path",
    "--custom-rm-path",
    "--dynamic-sampling-filter-path",
    "--rollout-sample-hook-path",
    "--rollout-sample-filter-path",
    "--rollout-all-samples-process-path",
    "--custom-rollout-log-function-path",
    "--custom-eval-rollout-log-function-path",
    "--custom-reward-post-process-path",
)


def variable(flag: str) -> str:
    """Name of the environment variable that names a user's plug-in."""
    return "SLIME_TEST_" + flag.removeprefix("--").replace("-", "_").upper()


def users(flag: str) -> list[Any]:
    """The parameter of a test that checks a user's plug-in: its path; skipped where none was named."""
    path = os.environ.get(variable(flag), "")
    mark = pytest.mark.skipif(not path, reason=f"{variable(flag)} names no plug-in")
    return [pytest.param(path, id=path or "none", marks=mark)]


def main(file: str, arguments: Sequence[str]) -> int:
    """Runs a test file; flags of plug-ins are for its tests, all other arguments for pytest."""
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        flag, equals, path = word.partition("=")
        if flag not in FLAGS:
            rest.append(word)
            continue
        path = path if equals else next(words, "")
        if not path:
            print(f"{Path(file).name}: error: {flag}: expected a path", file=sys.stderr)
            return 2
        os.environ[variable(flag)] = path
    # As where the test is started with its run's own command: modules of the directory can be imported.
    sys.path.insert(0, os.getcwd())
    return int(pytest.main([file, "-q", "-p", "no:cacheprovider", *rest]))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of characters as a Hugging Face directory; the engine needs no weights."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("checkpoint")
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(VOCABULARY)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(directory)
    config = {"model_type": "qwen3", "vocab_size": len(VOCABULARY), "max_position_embeddings": 64}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.stop()


class Run:
    def __init__(self, buffer: BufferClient, rollout: RolloutClient, n_samples: int) -> None:
        self.buffer = buffer
        self.rollout = rollout
        self.n_samples = n_samples
        self.metrics: dict[str, float] = {}

    def generate(self, groups: int = 2, rollout_id: int = 0) -> list[list[Sample]]:
        """The groups that a rollout completed, as the buffer holds them, by group index."""
        self.metrics = dict(self.rollout.generate(rollout_id, groups, timeout=TIMEOUT).metrics)
        stored = self.buffer.read_groups(states=["completed"])
        return [entry.group.samples for entry in sorted(stored, key=lambda entry: entry.group.group_index)]

    def evaluate(self, rollout_id: int = 0) -> dict[str, float]:
        return dict(self.rollout.evaluate(rollout_id, timeout=TIMEOUT).metrics)

    @property
    def states(self) -> dict[str, int]:
        """Counts the groups by state."""
        return {state: count for state, count in self.buffer.stats().groups.items() if count}


@contextmanager
def running(
    checkpoint: Path, engine: FakeEngine, directory: Path, *, n_samples: int = 2, **settings: Any
) -> Iterator[Run]:
    """settings: of RolloutSettings and of the buffer (buffer_filter_path)."""
    rows = [{"prompt": f"{i:03d}>", "label": f"{i:03d}"[::-1]} for i in range(PROMPTS)]
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    buffer_settings = BufferSettings(
        prompt_data=str(prompts), input_key="prompt", label_key="label", n_samples_per_prompt=n_samples,
        buffer_filter_path=settings.pop("buffer_filter_path", None),
        eval_prompt_data=[["held_out", f"{prompts}@[0:4]"]],
    )  # fmt: skip
    values = {"rm_type": "exact_partial", "rollout_max_response_len": 4, "rollout_prompt_wait_seconds": 5.0}
    # No more is leased at a time than a test asks for.
    values |= {"rollout_batch_size": 1} | settings
    rollout_settings = RolloutSettings(
        hf_checkpoint=str(checkpoint), n_samples_per_prompt=n_samples,
        rollout_external_engine_addrs=[f"127.0.0.1:{engine.port}"], **values,
    )  # fmt: skip
    extra = {"prompt_data": str(prompts), "input_key": "prompt", "label_key": "label"}
    with ExitStack() as stack:
        buffer_service = serve_buffer(buffer_settings, RpcSettings())
        stack.callback(buffer_service.stop, 0)
        rollout_service = serve_rollout(
            rollout_settings, RpcSettings(), buffer_address=buffer_service.address, extra_args=extra
        )
        stack.callback(rollout_service.stop, 0)
        buffer = stack.enter_context(BufferClient(buffer_service.address))
        writer = buffer.open_run("contracts")
        rollout = stack.enter_context(RolloutClient(rollout_service.address, writer=writer))
        yield Run(buffer, rollout, n_samples)


def check_sample(sample: Sample, *, trained: bool = True) -> None:
    """Checks what the trainer needs of a finished sample. trained: it comes from an engine and has log-probs."""
    sample.validate()
    assert sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED), f"status {sample.status}"
    assert 0 < sample.response_length < len(sample.tokens), "response_length of tokens"
    assert sample.reward is not None, "reward"
    tokens = np.asarray(sample.tokens)
    assert ((0 <= tokens) & (tokens < len(VOCABULARY))).all(), "tokens of the vocabulary"
    if sample.loss_mask is not None:
        assert len(sample.loss_mask) == sample.response_length, "loss_mask"
        assert set(np.asarray(sample.loss_mask).tolist()) <= {0, 1}, "loss_mask"
    if trained and sample.rollout_log_probs is not None:
        assert len(sample.rollout_log_probs) == sample.response_length, "rollout_log_probs"
        # A logarithm of a probability: rounding may put it a little above 0.
        assert np.isfinite(sample.rollout_log_probs).all(), "rollout_log_probs"
        assert (np.asarray(sample.rollout_log_probs) < 1e-3).all(), "rollout_log_probs of at most 0"
