"""Compiled layers, fused log-probs, padded rows and bfloat16 weights against the eager path and float64."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from trainer_float64 import flash_backward, flash_forward
from trainer_tiny import Runner, make_samples, make_settings, write_model

from slime.trainer.algorithms.fused_log_probs import FusedLogProbs
from slime.trainer.backends.base import TRAINING, WEIGHTS
from slime.trainer.backends.fsdp.compilation import Compiler, lengths_vary
from slime.trainer.backends.fsdp.model import decoder_layers, load_model
from slime.trainer.backends.fsdp.rows import RowShape, StaticRow, StaticRows
from slime.trainer.batching.packing import pack
from slime.trainer.batching.schedule import Lengths, fewest_bins
from slime.types import Sample

METRICS = ("train/loss", "train/grad_norm", "train/entropy_loss", "train/ppo_kl", "train/kl_loss")


def test_fused_log_probs_have_the_gradients_of_float64():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(7, 50, generator=generator)
    targets = torch.randint(0, 50, (7,), generator=generator)
    of_log_probs, of_entropy = torch.randn(7, generator=generator), torch.randn(7, generator=generator)
    exact = logits.double().requires_grad_()
    all_log_probs = (exact / 0.7).log_softmax(-1)
    log_probs = all_log_probs.gather(-1, targets[:, None])[:, 0]
    entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
    (expected,) = torch.autograd.grad((log_probs * of_log_probs + entropy * of_entropy).sum(), exact)
    leaf = logits.clone().requires_grad_()
    got = FusedLogProbs()(leaf * 1, targets, 0.7)
    (gradient,) = torch.autograd.grad(got, leaf, (of_log_probs, of_entropy))
    torch.testing.assert_close(got[0].double(), log_probs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[1].double(), entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.fixture(autouse=True)
def compiles() -> Iterator[None]:
    """Turns compilation on: Megatron without a GPU, in other tests of this process, turns it off."""
    with torch.compiler.set_stance("default"):
        yield


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch):
    """torch.compile that hands functions back: what is around them is tested without the minutes that it takes."""
    monkeypatch.setattr(torch, "compile", lambda function: function)


def run(model: str, **values: Any) -> tuple[list[dict[str, float]], Runner]:
    runner = Runner(make_settings(model, **values))
    return [runner.run(step) for step in range(3)], runner


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_tokens_per_gpu": 16, "num_steps_per_rollout": 2, "use_kl_loss": True, "kl_loss_coef": 0.1},
        {"use_dynamic_batch_size": False, "micro_batch_size": 1},
        {"entropy_coef": 0.01, "rollout_temperature": 0.7, "gradient_checkpointing": True},
        {"rollout_top_p": 0.9, "entropy_coef": 0.01},
        {"bf16": True, "use_dynamic_batch_size": False, "micro_batch_size": 1},
    ],
    ids=lambda values: next(iter(values), "plain"),
)
def test_padded_rows_and_fused_log_probs_train_as_the_eager_path(model: str, values: dict[str, Any]):
    (expected, eager), (found, fast) = run(model, lr=1e-4, **values), run(model, lr=1e-4, **values, compile=True)
    tolerance = 3e-2 if values.get("bf16") else 1e-4
    for before, after in zip(expected, found, strict=True):
        for name in [name for name in METRICS if name in before]:
            assert after[name] == pytest.approx(before[name], rel=tolerance, abs=tolerance / 100), name
    weights = fast.weights()
    for name, weight in eager.weights().items():
        assert ((weights[name] - weight).abs() > 2e-5).float().mean() < (0.2 if values.get("bf16") else 0.01), name


def test_compiled_layers_train_as_eager_ones(model: str):
    def apart(runner: Runner) -> dict[str, float]:
        samples = [s for i, s in enumerate(make_samples()) if i % 4 == 0]
        return runner.run(0, [Sample(**{**vars(s), "reward": float(i)}) for i, s in enumerate(samples)])

    values: dict[str, Any] = {"rewards_normalization": False, "max_tokens_per_gpu": 64, "lr": 1e-4}
    runners = [Runner(make_settings(model, **values, compile=compile)) for compile in (False, True)]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    expected, found = (apart(runner) for runner in runners)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert not runners[1].backend._compiler.failed and graphs >= 3
    for name in ("train/loss", "train/grad_norm", "train/entropy_loss"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    apart(runners[1])
    # All layers run what one was compiled to, and the second step what the first was.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_a_model_that_cannot_be_compiled_is_trained_as_it_is(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(function: Any) -> Any:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise torch._dynamo.exc.TorchDynamoException("no kernel for this")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    with caplog.at_level(logging.WARNING):
        (found, _), (expected, _) = run(model, compile=True), run(model)
    assert [r.getMessage() for r in caplog.records if "torch.compile" in r.getMessage()] == [
        "the model is trained without torch.compile, which failed: TorchDynamoException: no kernel for this "
        "(--no-compile does not try)"
    ]
    for before, after in zip(expected, found, strict=True):
        assert after["train/loss"] == pytest.approx(before["train/loss"], rel=1e-3, abs=1e-5)


def make_row(lengths: list[int], **rest: Any) -> Any:
    random = np.random.default_rng(0)
    samples = [
        Sample(index=i, group_index=i, tokens=random.integers(2, 32, n).astype(np.int32), response_length=n // 2)
        for i, n in enumerate(lengths)
    ]
    return pack(samples, range(len(lengths)), [0.0] * len(lengths), [1.0] * len(lengths), **rest)


class Replays:
    """Stands for the graphs of a shape, which a CPU cannot capture."""

    count = 0

    def __init__(self, forward: Any, backward: Any, row: StaticRow, with_entropy: bool, pool: Any) -> None:
        self.forward = self.backward = self
        self.log_probs = self.entropies = self.of_log_probs = torch.zeros(row.shape.trained)
        self.of_entropies = None

    def replay(self) -> None:
        Replays.count += 1


def sum_of_log_probs(number: int, batch: Any, outputs: Any) -> torch.Tensor:
    return outputs.log_probs.sum()


@pytest.fixture
def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> StaticRows:
    """Rows of up to 8,192 tokens of a model that computes nothing."""

    def forward(model: Any, tokens: Any, positions: Any, runs: Any, rows: torch.Tensor, targets: Any) -> Any:
        return torch.zeros(len(rows)), torch.zeros(len(rows))

    monkeypatch.setattr("slime.trainer.backends.fsdp.rows._Captured", Replays)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    rows = StaticRows(forward, lambda *_: None, torch.device("cpu"), 8192)
    rows.use_graphs(True)
    return rows


def log_uniform(random: np.random.Generator) -> list[int]:
    return [int(16 * 64 ** random.random()) for _ in range(128)]


def log_normal(random: np.random.Generator) -> list[int]:
    return [int(min(1 + random.lognormal(4.8, 1.0), 2048)) for _ in range(128)]


@pytest.mark.parametrize(
    ("draw", "replayed"), [(log_uniform, 0.8), (log_normal, 0.75), (lambda random: [1024] * 32, 1.0)]
)
def test_rows_of_any_lengths_are_replayed_from_four_shapes_that_stay(
    fake_graphs: StaticRows, draw: Callable[[np.random.Generator], list[int]], replayed: float
):
    rows = fake_graphs
    random, model = np.random.default_rng(0), torch.nn.Identity()
    seen = []
    for update in range(20):
        Replays.count, lengths = 0, draw(random)
        bins = fewest_bins(range(len(lengths)), Lengths(lengths), 8192)
        for positions in bins:
            batch = make_row([lengths[p] for p in positions])
            rows.forward_backward(model, 0, batch, sum_of_log_probs, "none", 1.0)
        rows.updated()
        seen.append((rows.captured, Replays.count / 2 / len(bins)))
        if update >= 3:
            # Neither captured again, nor without a graph more often than that is worth.
            assert rows.captured == seen[2][0]
    assert len(rows.shapes) <= 4 and np.mean([share for _, share in seen[3:]]) >= replayed
    for shape in rows.shapes:
        assert shape.runs * shape.longest <= 16 * shape.tokens


def test_shapes_have_room_for_more_samples_and_for_longer_ones_only_by_rounding(fake_graphs: StaticRows):
    fake_graphs.forward_backward(torch.nn.Identity(), 0, make_row([1000] * 8), sum_of_log_probs, "none", 1.0)
    (shape,) = fake_graphs.shapes
    assert shape.runs >= 12 and shape.longest == 1024


def test_rows_of_other_lengths_get_graphs_once_these_are_worth_it(fake_graphs: StaticRows):
    rows, model = fake_graphs, torch.nn.Identity()
    for number, lengths in enumerate(([2048] * 4, [4000, 4000], [300] * 3, [1500], [3000], [600] * 10)):
        before = rows.captured
        for update in range(70):
            Replays.count = 0
            rows.forward_backward(model, 0, make_row(lengths), sum_of_log_probs, "none", 1.0)
            rows.updated()
            assert rows.captured <= before + (update >= 50 or not number)
        assert Replays.count == 2 and rows.captured == before + 1 and len(rows.shapes) <= 4


def test_layers_are_compiled_for_one_length_of_rows_and_once_for_all_others(
    model: str, monkeypatch: pytest.MonkeyPatch
):
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_(function, backend="aot_eager"))
    # The compiler sees the operators of a GPU.
    monkeypatch.setattr("slime.trainer.backends.attention.flash_takes", lambda query: True)
    monkeypatch.setattr("slime.trainer.backends.shared_attention._kernel", flash_forward)
    monkeypatch.setattr("slime.trainer.backends.shared_attention._backward_kernel", flash_backward)
    policy, compiler, random = load_model(model, flag="--hf-checkpoint"), Compiler(), np.random.default_rng(0)
    compiler.layers(decoder_layers(policy), lengths_vary)
    log_probs = FusedLogProbs(compiler.function)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    graphs = []
    layouts: list[tuple[list[int], list[int]]] = [
        ([0, 0, 1], [5, 7, 3]), ([0, 1], [9, 20]), ([0, 0, 1, 1], [3] * 4), ([0], [12]), ([0, 0, 1, 1, 2, 2], [4] * 6),
    ]  # fmt: skip
    for prompts, lengths in layouts:
        samples = [
            Sample(tokens=np.array([2 + prompt] * 3 + random.integers(2, 32, n).tolist(), np.int32), response_length=n)
            for prompt, n in zip(prompts, lengths, strict=True)
        ]
        batch = pack(samples, range(len(samples)), [0.0] * len(samples), [1.0] * len(samples))
        row = StaticRow(RowShape.of(batch, 64, 64), torch.device("cpu"), one_length=True)
        row.fill(batch)
        for tokens, positions, runs, rows, targets in (
            (batch.tokens, batch.position_ids, batch.runs, batch.rows, batch.targets),
            (row.tokens, row.position_ids, row.runs, row.rows, row.targets),
        ):
            logits = policy(tokens, position_ids=positions, runs=runs, logits_to_keep=rows).logits[0]
            found, entropy = log_probs(logits, targets, 1.0)
            torch.autograd.grad((found.sum() + entropy.sum()), list(policy.parameters()), allow_unused=True)
        graphs.append(counters["stats"]["unique_graphs"])
    assert not compiler.failed and graphs[0] >= 3 and graphs[1:] == graphs[:1] * 4


@pytest.mark.parametrize("lengths", [[8, 8, 8], [3, 20, 9], [2], [40, 40]])
def test_a_padded_row_is_the_row_and_sequences_of_padding(lengths: list[int]):
    batch = make_row(lengths)
    shape = RowShape.of(batch, 64)
    row = StaticRow(shape, torch.device("cpu"))
    for other in (make_row([7] * min(4, len(lengths))), batch):
        if shape.takes(other, RowShape.of(other, 64)):
            row.fill(other)
    # A sample's last token is not fed in.
    limits, total = row.limits.tolist(), sum(lengths) - len(lengths)
    assert limits[: len(lengths) + 1] == [sum(lengths[:i]) - i for i in range(len(lengths) + 1)]
    assert limits == sorted(limits) and limits[-1] == shape.tokens
    assert max(b - a for a, b in zip(limits, limits[1:], strict=False)) <= row.runs.max_q
    assert row.tokens[0, :total].tolist() == batch.tokens[0].tolist() and not row.tokens[0, total:].any()
    assert row.rows[: len(batch.rows)].tolist() == batch.rows.tolist()
    assert row.rows.max() < shape.tokens


def test_a_row_may_score_more_tokens_than_it_has():
    """Answers of one token to one prompt: its last token predicts them all."""
    samples = [Sample(tokens=[1, 2, 3, 4 + answer], response_length=1) for answer in range(20)]
    batch = pack(samples, range(20), [0.0] * 20, [1.0] * 20)
    assert batch.tokens.shape == (1, 3) and len(batch.rows) == 20
    shape = RowShape.of(batch, 8)
    row = StaticRow(shape, torch.device("cpu"))
    row.fill(batch)
    assert row.rows[:20].tolist() == [2] * 20 and row.rows.max() < shape.tokens
    assert row.targets[:20].tolist() == batch.targets.tolist()


def test_bfloat16_weights_follow_a_float32_copy(model: str):
    runner = Runner(make_settings(model, bf16=True, lr=1e-4))
    before = runner.weights()
    runner.run(0)
    policy, after = dict(runner.backend.policy.named_parameters()), runner.weights()
    sent = {name: tensor.clone() for name, tensor in runner.backend.named_weights(dtype=torch.bfloat16)}
    moved = 0
    for name, weight in after.items():
        assert weight.dtype == torch.float32 and policy[name].dtype == torch.bfloat16
        assert torch.equal(weight.to(torch.bfloat16), policy[name]) and torch.equal(sent[name], policy[name])
        moved += int(((weight != before[name]) & (weight.bfloat16() == before[name].bfloat16())).sum())
    # Steps too small for bfloat16 are not lost.
    assert moved > 1000
    whole = {t.untyped_storage().data_ptr() for t, _ in runner.backend.device_tensors(WEIGHTS)}
    training = {t.untyped_storage().data_ptr() for t, _ in runner.backend.device_tensors(TRAINING)}
    assert len(whole) <= 2 + sum(1 for _ in runner.backend.policy.buffers()) and len(training) >= 8


def test_gradients_of_rows_are_added_up_in_float32(tmp_path: Any):
    model = write_model(tmp_path / "m")
    runner = Runner(make_settings(model, bf16=True))
    master = runner.backend._master
    ones = [torch.ones_like(p) for p in master.parameters]
    for _ in range(300):
        master.add_gradients(ones)
    # In bfloat16, 256 + 1 is 256.
    assert all(bool((gradient == 300).all()) for gradient in master.gradients)


def test_the_cache_of_compiled_code_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Compiler()
    import os

    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "slime" / "torchinductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    Compiler()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"
