"""Training by Tinker's requests against float64: log-probs, losses, gradients added up over requests, and updates."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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


def test_a_prompt_that_data_share_is_laid_out_once(directory: Path) -> None:
    data = group(1, ("weights",))
    row, *more = rows_module.make_rows(data, [5, 5, 5, 0], share=True, gather=False, device=torch.device("cpu"))
    assert not more
    assert row.batch.tokens.shape[1] == 6 + (7 + 4 + 9 - 3) + 4
    assert [len(places) for places in row.places] == [len(datum.tokens) for datum in data]
    (row,) = rows_module.make_rows(data, [5, 5, 5, 0], share=False, gather=False, device=torch.device("cpu"))
    assert row.batch.tokens.shape[1] == sum(len(datum.tokens) for datum in data)
    assert [len(set(places)) for places in row.places] == [len(datum.tokens) for datum in data]


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
