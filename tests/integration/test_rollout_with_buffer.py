"""slime-rollout with its embedded engine on a real buffer, over gRPC: a tiny random model, real tokens."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from slime.buffer.service import serve as serve_buffer
from slime.buffer.settings import BufferSettings
from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.service import serve as serve_rollout
from slime.rollout.settings.rollout import RolloutSettings
from slime.types import Sample
from slime.types.clients import BufferClient, Engine, GenerateResult, RolloutClient
from slime.types.errors import EngineError, MissingFile, SlimeError
from slime.types.rpc import RpcSettings, RunningService

VOCABULARY = ["<pad>", "<eos>", *"0123456789>"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A random model of two layers, and a tokenizer of characters."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=32, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(VOCABULARY)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"prompt": f"{i:03d}>", "label": f"{i:03d}"[::-1]} for i in range(64)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


class Pair:
    """A buffer and a rollout service with their clients."""

    first_rollout: GenerateResult

    def __init__(self, checkpoint: Path, prompts: Path, n_samples: int = 4, **settings) -> None:
        self.buffer_service: RunningService = serve_buffer(
            BufferSettings(
                prompt_data=str(prompts), input_key="prompt", label_key="label", n_samples_per_prompt=n_samples,
                eval_prompt_data=[["held_out", f"{prompts}@[0:8]"]],
            ),
            RpcSettings(),
        )  # fmt: skip
        values = dict(rm_type="exact_partial", rollout_max_response_len=4, rollout_engine_threads=1) | settings
        self.buffer = BufferClient(self.buffer_service.address)
        try:
            self.rollout_service: RunningService = serve_rollout(
                RolloutSettings(hf_checkpoint=str(checkpoint), n_samples_per_prompt=n_samples, **values),
                RpcSettings(),
                buffer_address=self.buffer_service.address,
            )
        except BaseException:
            self.buffer.close()
            self.buffer_service.stop(0)
            raise
        self.rollout = RolloutClient(self.rollout_service.address, writer=self.buffer.open_run("test"))

    def close(self) -> None:
        self.rollout.close()
        self.buffer.close()
        self.rollout_service.stop(0)
        self.buffer_service.stop(0)

    def groups(self, indexes: Iterable[int]) -> list[list[Sample]]:
        return [stored.group.samples for stored in self.buffer.read_groups(group_indexes=list(indexes))]


@pytest.fixture(scope="module")
def pair(checkpoint, prompts) -> Iterator[Pair]:
    """With eight groups that its first rollout has completed."""
    pair = Pair(checkpoint, prompts, deterministic=True)
    pair.first_rollout = pair.rollout.generate(0, 8, timeout=60)
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def other(checkpoint, prompts) -> Iterator[Pair]:
    pair = Pair(checkpoint, prompts, deterministic=True, use_fault_tolerance=False)
    yield pair
    pair.close()


def test_a_rollout_ends_in_the_buffer(pair):
    groups = pair.groups(range(8))
    assert len(groups) == 8 and all(len(group) == 4 for group in groups)
    for sample in (sample for group in groups for sample in group):
        assert sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
        assert 1 <= sample.response_length <= 4 and len(sample.rollout_log_probs) == sample.response_length
        assert max(sample.rollout_log_probs) <= 0 and sample.weight_versions == ["0"]
        assert 0 <= sample.reward <= 1
    rewards = [sample.reward for group in groups for sample in group]
    assert pair.first_rollout.metrics["rollout/raw_reward"] == pytest.approx(np.mean(rewards))
    assert pair.buffer.stats().groups.get("leased", 0) == 0
    assert len(pair.buffer.seal_step(0, 8, wait_seconds=5)) == 32


def test_evaluation_is_the_same_each_time(pair):
    first, second = (pair.rollout.evaluate(i, timeout=60).metrics for i in range(2))
    assert "eval/held_out" in first
    del first["perf/eval_time"], second["perf/eval_time"]
    assert first == second


def test_code_that_a_client_of_the_buffer_names_is_not_run(pair, tmp_path):
    marker = tmp_path / "ran"
    file = tmp_path / "evil.py"
    file.write_text(
        f"open({str(marker)!r}, 'w')\nasync def generate(args, sample, sampling_params):\n    return sample\n"
    )
    (lease,) = pair.buffer.lease_groups(1, ttl_seconds=30, wait_seconds=5, worker_id="evil")
    samples = lease.group.samples
    for sample in samples:
        sample.generate_function_path = f"{file}:generate"
    pair.buffer.return_group(lease.token, samples)
    assert pair.rollout.generate(2, 2, timeout=60).metrics["rollout/raw_reward"] >= 0
    assert not marker.exists()
    (stored,) = pair.buffer.read_groups(group_indexes=[lease.group.group_index])
    assert (stored.state, stored.reject_reason) == ("rejected", "unknown generate_function_path")


def test_new_weights_serve_after_the_commit(pair, checkpoint):
    asyncio.run(load(pair.rollout.begin_weight_update(1), checkpoint, 1))
    pair.rollout.commit_weight_update(1)
    assert pair.rollout.generate(1, 2, timeout=60).metrics["rollout/weight_version_min"] == 1


def test_two_deterministic_runs_are_alike_token_for_token(pair, other):
    other.rollout.generate(0, 8, timeout=60)
    first, second = (
        [(s.index, s.tokens, s.rollout_log_probs, s.reward) for g in p.groups(range(8)) for s in g]
        for p in (pair, other)
    )
    assert len(first) == 32 and first == second


def test_a_cancelled_rollout_leaves_no_lease(pair):
    with pytest.raises(SlimeError):
        pair.rollout.generate(5, 40, timeout=0.02)
    deadline = time.monotonic() + 20
    while pair.rollout.status().running_rollouts or pair.buffer.stats().groups.get("leased", 0):
        assert time.monotonic() < deadline


def test_without_fault_tolerance_an_engine_that_dies_ends_the_rollout_and_no_prompt_is_lost(other):
    (engine,) = other.rollout.status().engines
    port = int(engine.url.rsplit(":", 1)[1])
    (process,) = [p for p in psutil.Process().children() if port in {c.laddr.port for c in p.net_connections("tcp")}]
    process.kill()
    with pytest.raises(EngineError, match=rf"(?s){engine.name}.*SIGKILL.*its last lines"):
        for rollout_id in range(1, 1000):
            other.rollout.generate(rollout_id, 8, timeout=60)
    assert other.buffer.stats().groups.get("leased", 0) == 0
    assert not other.rollout.status().engines[0].healthy


def test_engines_that_hang_or_die_cost_no_sample_and_come_back_with_the_weights(checkpoint, prompts):
    probes = dict(rollout_health_check_interval=0.5, rollout_health_check_timeout=3.0)
    pair = Pair(checkpoint, prompts, rollout_num_engines=2, rollout_max_response_len=24, **probes)
    try:
        hung = generate_with_a_lost_engine(pair, 0, lambda process: None)
        wait_for(lambda: all(engine.healthy for engine in pair.rollout.status().engines))
        engines = pair.rollout.begin_weight_update(1)
        asyncio.run(load(engines, checkpoint, 1))
        pair.rollout.commit_weight_update(1)

        dead = generate_with_a_lost_engine(pair, 1, psutil.Process.kill)
        wait_for(lambda: pair.rollout.status().engines[0].awaits_weights)
        (returned,) = pair.rollout.begin_joining(1)
        asyncio.run(load([returned], checkpoint, 1))
        pair.rollout.commit_weight_update(1)
        assert not any(engine.awaits_weights for engine in pair.rollout.status().engines)
        last = pair.rollout.generate(2, 8, timeout=300).metrics
    finally:
        pair.close()
    assert (hung["rollout/weight_version_max"], dead["rollout/weight_version_min"]) == (0, 1)
    assert last["rollout/weight_version_min"] == 1


def generate_with_a_lost_engine(pair: Pair, rollout_id: int, end: Callable[[psutil.Process], None]) -> dict[str, float]:
    """Generates 8 groups while the first engine is stopped, and then ended by `end`; returns the metrics."""
    port = int(pair.rollout.status().engines[0].url.rsplit(":", 1)[1])
    (process,) = [p for p in psutil.Process().children() if port in {c.laddr.port for c in p.net_connections("tcp")}]
    process.suspend()
    before = {stored.group.group_index for stored in pair.buffer.read_groups(states=["completed"])}
    with ThreadPoolExecutor(1) as pool:
        generating = pool.submit(pair.rollout.generate, rollout_id, 8, timeout=300)
        wait_for(lambda: pair.rollout.status().engines[0].in_flight)
        end(process)
        metrics = generating.result(300).metrics
    assert metrics["rollout/engine_restarts"] >= 1
    groups = [stored.group for stored in pair.buffer.read_groups(states=["completed"])]
    new = [group for group in groups if group.group_index not in before]
    indexes = [sample.index for group in new for sample in group.samples]
    assert len(new) == 8 and len(indexes) == len(set(indexes)) == 32
    assert pair.buffer.stats().groups.get("leased", 0) == 0
    return metrics


def wait_for(condition: Callable[[], object], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def load(engines: Iterable[Engine], checkpoint: Path, version: int) -> None:
    """Loads weights, as a trainer does between the begin of an update and its commit."""
    for engine in engines:
        async with EngineClient(engine.url, engine.name, api_key=engine.api_key) as client:
            await client.update_weights_from_disk(str(checkpoint), version)


def test_a_model_directory_without_a_tokenizer(checkpoint, prompts, tmp_path):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(MissingFile, match="has no tokenizer"):
        Pair(tmp_path, prompts)


def test_log_probs_of_a_teacher_reach_the_buffer(checkpoint, prompts):
    """The teacher is an engine with the same weights, so it says what the engine of the rollout said."""
    with start_embedded(EmbeddedOptions(model_path=str(checkpoint), threads=1)) as teacher:
        url = f"{teacher.wait_ready(120).url}/generate"
        reward = "slime.rollout.on_policy_distillation.reward_func"
        pair = Pair(checkpoint, prompts, rm_type=None, custom_rm_path=reward, rm_url=url)
        try:
            pair.rollout.generate(0, 2, timeout=60)
            samples = [sample for group in pair.groups(range(2)) for sample in group]
        finally:
            pair.close()
    assert len(samples) == 8
    for sample in samples:
        assert sample.reward == 0 and sample.response_length > 0
        assert sample.teacher_log_probs == pytest.approx(sample.rollout_log_probs, abs=1e-4)


def test_responses_go_on_under_new_weights_where_generation_never_ends(checkpoint, prompts):
    from slime.types.clients.rollout import StopSignal
    from slime.types.pace import TrainerPace

    pair = Pair(checkpoint, prompts, rollout_max_response_len=24)
    pace, stop, failures = TrainerPace(2, 8, 1000), StopSignal(), []

    def generate() -> None:
        try:
            pair.rollout.generate_on(0, pace, stop, lambda metrics: None)
        except SlimeError as error:
            failures.append(error)

    async def push(version: int) -> None:
        await load(await asyncio.to_thread(pair.rollout.begin_weight_update, version), checkpoint, version)
        await asyncio.to_thread(pair.rollout.commit_weight_update, version)

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        mixed = 0
        for step in range(40):
            summaries = pair.buffer.seal_step(step, 8, wait_seconds=120, pace=pace)
            assert all(step - summary.oldest_weight_version <= 2 for summary in summaries)
            for sample in pair.buffer.read_step(step, range(len(summaries))):
                versions = [span.weight_version for span in sample.spans]
                assert versions == sorted(set(versions), key=int)
                assert sample.spans[-1].end == sample.response_length == len(sample.rollout_log_probs)
                mixed += len(versions) > 1
            pair.buffer.acknowledge_step(step)
            asyncio.run(push(step + 1))
            if mixed and step > 2:
                break
        assert mixed
    finally:
        stop.set()
        thread.join(60)
        pair.close()
    assert not failures
