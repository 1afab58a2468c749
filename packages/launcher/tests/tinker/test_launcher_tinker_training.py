"""Training by Tinker's requests against float64: log-probs, losses, gradients added up over requests, and updates."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime.launcher.tinker import rows as rows_module
from slime.launcher.tinker.messages import ForwardBackwardOutput
from slime.launcher.tinker.requests import Adam, Datum, PassRequest, read_adam
from slime.launcher.tinker.training import TrainedModel
from slime.launcher.tiny_model import write_model
from slime.types.errors import InvalidField, NotAvailable, Unavailable, WrongState

CHARACTERS = "0123456789+=>"
VOCABULARY = len(CHARACTERS) + 2
ADAM = Adam(learning_rate=3e-3, beta1=0.8, beta2=0.9, eps=1e-9, weight_decay=0.1, grad_clip_norm=0.5)
SAMPLED = ("logprobs", "advantages")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tinker") / "model", CHARACTERS, seed=3)


def group(seed: int, names: tuple[str, ...], sizes: tuple[int, ...] = (7, 4, 9)) -> list[Datum]:
    """Data with a prompt in common that has no share in the loss, and one without a prompt."""
    random = np.random.default_rng(seed)
    prompt = random.integers(2, VOCABULARY, 6)
    found = []
    for number, size in enumerate((*sizes, 5)):
        alone = number == len(sizes)
        answer = random.integers(2, VOCABULARY, size)
        tokens = answer if alone else np.concatenate([prompt, answer])
        untrained = 0 if alone else len(prompt) - 1
        inputs = {}
        for name in names:
            values = random.normal(size=len(tokens) - 1) - (2.5 if name == "logprobs" else 0.0)
            values[:untrained] = 0.0
            inputs[name] = values.astype(np.float32)
        found.append(Datum(tokens[:-1], tokens[1:], inputs))
    return found


def decoded(content: bytes) -> tuple[list[np.ndarray], float]:
    output = ForwardBackwardOutput.FromString(content)
    (record,) = output.loss_fn_outputs
    field = record.fields["logprobs"]
    ends = np.frombuffer(field.offsets, dtype="<i8") // 4
    values = np.frombuffer(field.data, dtype="<f4")
    assert record.num_datums == len(ends) - 1
    return np.split(values, ends[1:-1]), output.metrics["loss:sum"]


class Reference:
    """The model in float64, one sequence after the other, with torch's own AdamW."""

    def __init__(self, directory: Path, adam: Adam) -> None:
        from transformers import AutoModelForCausalLM

        self.adam = adam
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
        self.model.eval()
        named = list(self.model.named_parameters())
        groups = [
            {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": adam.weight_decay},
            {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps)

    def log_probs(self, datum: Datum) -> Tensor:
        logits = self.model(torch.from_numpy(datum.tokens)[None]).logits[0]
        return logits.log_softmax(-1).gather(-1, torch.from_numpy(datum.targets)[:, None])[:, 0]

    def run(self, data: list[Datum], loss: Callable[..., Tensor]) -> tuple[list[np.ndarray], float]:
        total, found = 0.0, []
        for datum in data:
            log_probs = self.log_probs(datum)
            inputs = {name: torch.from_numpy(values).double() for name, values in datum.inputs.items()}
            value = loss(log_probs, inputs).sum()
            value.backward()
            total += value.item()
            found.append(log_probs.detach().numpy())
        return found, total

    def step(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.adam.grad_clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.item()


def _ratio(log_probs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return (log_probs - inputs["logprobs"]).exp()


def _ppo(log_probs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    ratio, advantages = _ratio(log_probs, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, ratio.clamp(0.7, 1.4) * advantages)


# Written out from the definitions of the protocol.
FORMULAS: dict[str, tuple[tuple[str, ...], dict[str, float], Callable[..., Tensor]]] = {
    "cross_entropy": (("weights",), {}, lambda lp, i: -lp * i["weights"]),
    "importance_sampling": (SAMPLED, {}, lambda lp, i: -_ratio(lp, i) * i["advantages"]),
    "ppo": (SAMPLED, {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4}, _ppo),
    "cispo": (SAMPLED, {}, lambda lp, i: -_ratio(lp, i).clamp(0.0, 4.0).detach() * i["advantages"] * lp),
    "dro": (
        SAMPLED,
        {"beta": 0.2},
        lambda lp, i: -(lp * i["advantages"] - 0.5 * 0.2 * (lp - i["logprobs"]) ** 2),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_gradients_add_up_over_requests_until_the_step_as_in_float64(
    directory: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, config, formula = FORMULAS[name]
    # Three rows a request.
    monkeypatch.setattr(rows_module, "ROW_TOKENS", 14)
    trained, reference = TrainedModel(str(directory)), Reference(directory, ADAM)
    for update in range(2):
        for request in range(2):
            data = group(10 * update + request, inputs)
            log_probs, loss = decoded(trained.run(PassRequest(data, name, config, forward_only=False)))
            expected, expected_loss = reference.run(data, formula)
            assert loss == pytest.approx(expected_loss, rel=2e-4, abs=1e-4)
            for values, theirs in zip(log_probs, expected, strict=True):
                np.testing.assert_allclose(values, theirs, atol=2e-4)
        # A pass without gradient between them leaves the sum alone.
        trained.run(PassRequest(group(5, inputs), name, config, forward_only=True))
        metrics = trained.step(ADAM)["metrics"]
        assert metrics["grad_norm"] == pytest.approx(reference.step(), rel=1e-3)
    after = group(99, ("weights",))
    ours, _ = decoded(trained.run(PassRequest(after, "cross_entropy", {}, forward_only=True)))
    for found, datum in zip(ours, after, strict=True):
        np.testing.assert_allclose(found, reference.log_probs(datum).detach().numpy(), atol=1e-3)


def test_targets_need_not_be_the_next_tokens(directory: Path) -> None:
    trained, reference = TrainedModel(str(directory)), Reference(directory, ADAM)
    data = [Datum(each.tokens, each.targets[::-1].copy(), each.inputs) for each in group(1, ("weights",))]
    ours, _ = decoded(trained.run(PassRequest(data, "cross_entropy", {}, forward_only=True)))
    for found, datum in zip(ours, data, strict=True):
        np.testing.assert_allclose(found, reference.log_probs(datum).detach().numpy(), atol=2e-4)


@pytest.fixture(scope="module")
def exact(directory: Path) -> tuple[TrainedModel, Reference]:
    """The service's model and transformers', both in float64."""
    trained = TrainedModel(str(directory))
    trained._backend.policy.double()
    return trained, Reference(directory, ADAM)


# From a small alphabet, so that data have beginnings of any length in common, and whole data come twice.
SEQUENCES = st.lists(st.lists(st.integers(2, 3), min_size=1, max_size=7), min_size=1, max_size=9)


@settings(deadline=None, max_examples=25)
@given(SEQUENCES, st.sampled_from(sorted(FORMULAS)), st.integers(1, 40), st.integers(1, 4), st.integers(0, 99))
def test_whatever_data_share_loss_and_gradients_are_those_of_float64(
    exact: tuple[TrainedModel, Reference], sequences: list[list[int]], name: str, size: int, most: int, seed: int
) -> None:
    trained, reference = exact
    inputs, config, formula = FORMULAS[name]
    random, data = np.random.default_rng(seed), []
    for tokens in sequences:
        values = {each: random.normal(size=len(tokens)).astype(np.float32) for each in inputs}
        # Beginnings without a share in the loss, as prompts are, up to whole data.
        values[inputs[-1]][: random.integers(0, len(tokens) + 1)] = 0.0
        data.append(Datum(np.array(tokens), random.integers(2, 5, len(tokens)), values))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "ROW_TOKENS", size)
        patch.setattr(rows_module, "MOST_KEYS", most)
        log_probs, loss = decoded(trained.run(PassRequest(data, name, config, forward_only=False)))
    found = {name: p.grad for name, p in trained._backend.policy.named_parameters()}
    trained._backend.drop_gradients()
    expected, expected_loss = reference.run(data, formula)
    wanted = {name: p.grad for name, p in reference.model.named_parameters()}
    reference.optimizer.zero_grad()
    # Log-probs and losses are told in float32.
    terms = sum(np.abs(values).sum() for values in expected) + sum(np.abs(d.inputs[inputs[-1]]).sum() for d in data)
    assert loss == pytest.approx(expected_loss, rel=1e-6, abs=1e-6 * terms)
    for values, theirs in zip(log_probs, expected, strict=True):
        np.testing.assert_allclose(values, theirs, rtol=1e-6, atol=1e-6)
    length = sum(float(gradient.norm()) ** 2 for gradient in wanted.values()) ** 0.5
    for each, gradient in wanted.items():
        ours = found[each] if found[each] is not None else torch.zeros_like(gradient)
        assert float((ours - gradient).norm()) <= 1e-6 * length, each


def prefixes(data: list[Datum]) -> set[tuple[int, ...]]:
    return {tuple(datum.tokens[:end].tolist()) for datum in data for end in range(1, len(datum.tokens) + 1)}


# The first row of a process imports torch's compiler, which takes seconds.
@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12), st.booleans(),
    st.integers(1, 30), st.integers(0, 9),
)  # fmt: skip
def test_a_row_holds_what_its_data_begin_with_in_common_once(
    sequences: list[list[int]], share: bool, size: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    data = [Datum(np.array(tokens), random.integers(0, 3, len(tokens)), {}) for tokens in sequences]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "ROW_TOKENS", size)
        rows = list(rows_module.make_rows(data, share=share, device=torch.device("cpu")))
    assert [number for row in rows for number in row.data] == list(range(len(data)))
    for row in rows:
        of_row, batch = [data[number] for number in row.data], row.batch
        held = len(prefixes(of_row)) if share else sum(len(datum.tokens) for datum in of_row)
        assert batch.tokens.shape == batch.position_ids.shape == (1, held)
        assert held <= size or len(of_row) == 1
        assert batch.scored is not None
        predictors, targets = batch.rows[batch.scored].numpy(), batch.targets[batch.scored].numpy()
        for datum, path, wanted in zip(of_row, row.divided(predictors), row.divided(targets), strict=True):
            assert batch.tokens[0, path].tolist() == datum.tokens.tolist()
            assert batch.position_ids[0, path].tolist() == list(range(len(datum.tokens)))
            assert wanted.tolist() == datum.targets.tolist()
        assert row.joined([datum.targets for datum in data]).tolist() == targets.tolist()
        assert len(batch.rows) == len(set(zip(batch.rows.tolist(), batch.targets.tolist(), strict=True)))


def test_the_keys_that_a_row_reads_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "ROW_TOKENS", 10)
    monkeypatch.setattr(rows_module, "MOST_KEYS", 3)
    data = [Datum(np.arange(8), np.arange(8), {})] * 7
    rows = rows_module.make_rows(data, share=True, device=torch.device("cpu"))
    assert [len(row.data) for row in rows] == [3, 3, 1]


@pytest.mark.parametrize("name", [name for name in FORMULAS if name != "dro"])
def test_data_without_a_share_in_the_loss_have_a_forward_pass_alone(
    directory: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, config, formula = FORMULAS[name]
    trained, reference = TrainedModel(str(directory)), Reference(directory, ADAM)
    learned, constant = group(1, inputs), group(2, inputs)
    for datum in constant:
        # A group whose rewards are all equal.
        datum.inputs[inputs[-1]][:] = 0.0
    scored, passed = recorded(trained, "scores", monkeypatch), recorded(trained, "forward_backward", monkeypatch)
    data = [datum for pair in zip(learned, constant, strict=True) for datum in pair]
    log_probs, loss = decoded(trained.run(PassRequest(data, name, config, forward_only=False)))
    expected, expected_loss = reference.run(data, formula)
    assert loss == pytest.approx(expected_loss, rel=2e-4, abs=1e-4)
    for values, theirs in zip(log_probs, expected, strict=True):
        np.testing.assert_allclose(values, theirs, atol=2e-4)
    assert trained.step(ADAM)["metrics"]["grad_norm"] == pytest.approx(reference.step(), rel=1e-3)
    assert passed == [len(prefixes(learned))]
    assert scored == [len(prefixes(constant))]

    scored.clear()
    passed.clear()
    trained.run(PassRequest(constant, name, config, forward_only=False))
    assert (len(scored), passed) == (1, [])
    assert trained.step(ADAM)["metrics"]["grad_norm"] == 0


def recorded(trained: TrainedModel, method: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets the number of tokens of each row that the backend computes by `method`."""
    found, tokens = getattr(trained._backend, method), list[int]()

    def run(batches: Any, *args: Any) -> Any:
        tokens.extend(batch.tokens.shape[1] for batch in batches)
        return found(batches, *args)

    monkeypatch.setattr(trained._backend, method, run)
    return tokens


def test_a_step_after_a_failed_pass_is_refused_once_and_changes_nothing(directory: Path) -> None:
    trained = TrainedModel(str(directory))
    data = group(1, ("weights",))
    before, _ = decoded(trained.run(PassRequest(data, "cross_entropy", {}, forward_only=False)))
    trained.fail("request 7: no room")
    with pytest.raises(WrongState, match="request 7: no room"):
        trained.step(ADAM)
    after, _ = decoded(trained.run(PassRequest(data, "cross_entropy", {}, forward_only=True)))
    np.testing.assert_array_equal(np.concatenate(before), np.concatenate(after))
    assert trained.updates == 0
    trained.step(ADAM)
    assert trained.updates == 1


def test_a_checkpoint_resumes_with_the_moments_of_the_optimizer(directory: Path, tmp_path: Path) -> None:
    def train(model: TrainedModel, seeds: tuple[int, ...]) -> np.ndarray:
        for seed in seeds:
            model.run(PassRequest(group(seed, ("weights",)), "cross_entropy", {}, forward_only=False))
            model.step(ADAM)
        found, _ = decoded(model.run(PassRequest(group(50, ("weights",)), "cross_entropy", {}, forward_only=True)))
        return np.concatenate(found)

    through, half = TrainedModel(str(directory)), TrainedModel(str(directory))
    expected = train(through, (1, 2, 3))
    train(half, (1, 2))
    half.save(tmp_path / "saved")
    resumed = TrainedModel(str(directory), start=tmp_path / "saved", optimizer=True)
    anew = TrainedModel(str(directory), start=tmp_path / "saved")
    np.testing.assert_array_equal(train(resumed, (3,)), expected)
    assert np.abs(train(anew, (3,)) - expected).max() > 1e-3


def test_weights_alone_are_no_start_with_an_optimizer(directory: Path) -> None:
    with pytest.raises(WrongState, match="holds weights only: load it without the optimizer"):
        TrainedModel(str(directory), start=directory, optimizer=True)


@pytest.mark.parametrize("forward_only", [False, True])
def test_a_pass_ends_with_the_service_and_not_with_its_last_row(
    directory: Path, monkeypatch: pytest.MonkeyPatch, forward_only: bool
) -> None:
    monkeypatch.setattr(rows_module, "ROW_TOKENS", 1)
    closing = threading.Event()
    trained = TrainedModel(str(directory), closing=closing)
    computed: list[int] = []

    def outputs(*args: Any) -> Any:
        computed.append(1)
        closing.set()
        return found(*args)

    found = trained._backend._passes.outputs
    monkeypatch.setattr(trained._backend._passes, "outputs", outputs)
    with pytest.raises(Unavailable, match="the service ends"):
        trained.run(PassRequest(group(1, ("weights",)), "cross_entropy", {}, forward_only=forward_only))
    assert computed == [1]


@pytest.mark.parametrize("value", [0.0, 10**400, float("nan"), True])
def test_an_epsilon_that_makes_weights_infinite_is_refused(value: float) -> None:
    with pytest.raises(InvalidField, match="adam_params.eps"):
        read_adam({"adam_params": {"eps": value}})
    assert read_adam({"adam_params": {}}) == Adam()


@pytest.mark.parametrize(
    ("name", "inputs", "config", "error", "said"),
    [
        ("gspo", ("weights",), {}, NotAvailable, "loss_fn gspo is not supported yet"),
        ("crossentropy", ("weights",), {}, InvalidField, "loss_fn: got crossentropy"),
        ("ppo", ("advantages",), {}, InvalidField, r"data\[0\].logprobs"),
        ("cross_entropy", ("weights", "mask"), {}, InvalidField, r"data\[0\].mask"),
        ("ppo", SAMPLED, {"clip": 0.2}, InvalidField, "loss_fn_config.clip"),
        ("ppo", SAMPLED, {"clip_low_threshold": 1.2}, InvalidField, "clip_low_threshold <= 1"),
    ],
)
def test_a_loss_that_cannot_be_computed_is_named(
    directory: Path, name: str, inputs: tuple[str, ...], config: dict[str, float], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        TrainedModel(str(directory)).run(PassRequest(group(1, inputs), name, config, forward_only=False))
