"""Checks of kept samples for faults that curves do not show: masks, weight versions, log-probs and rewards.

Each check gets the samples of one file together, because rewards are compared within a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from slime.rollout.settings.rollout import DEFAULT_ROLLOUT_FUNCTION
from slime.types.errors import counted

Row = dict[str, Any]
# Mean difference of log-probs over a response, in nats: far more than two precisions differ by.
FAR_APART = 0.1
# Log-probs that fit so many times better when shifted by one token belong to the neighbouring token.
SHIFT_FACTOR = 4.0
# No bound on the age of weights.
ANY_AGE = 1 << 30
COLUMNS = (
    "step", "dataset", "group_index", "index", "prompt", "response", "label", "reward", "status", "response_length",
    "tokens", "loss_mask", "engine_log_probs", "trainer_log_probs", "spans", "metadata",
)  # fmt: skip


@dataclass(frozen=True)
class Rules:
    """Facts about the run.

    staleness: the most iterations between the weights of a sample and the training on it.
    masks_old: tokens of older weights are masked on purpose. random: rewards are random.
    """

    staleness: int = 0
    masks_old: bool = False
    random: bool = False

    @classmethod
    def of(cls, settings: dict[str, Any], *, asynchronous: bool) -> Rules:
        interval = int(settings.get("update_weights_interval") or 1)
        ahead = int(settings.get("async_buffer_size") or 1) if asynchronous else 0
        # Groups that were given back continue with newer weights, so their first tokens may be of any age. The same
        # holds for recorded rollouts, and for samples of a user's rollout function.
        function = settings.get("rollout_function_path", DEFAULT_ROLLOUT_FUNCTION)
        any_age = function != DEFAULT_ROLLOUT_FUNCTION or any(
            settings.get(name) for name in ("partial_rollout", "load_debug_rollout_data", "fully_async")
        )
        bound = settings.get("max_staleness")
        return cls(
            staleness=int(bound) if bound is not None else ANY_AGE if any_age else interval - 1 + ahead,
            masks_old=bool(settings.get("mask_offpolicy_in_partial_rollout")),
            random=settings.get("rm_type") == "random",
        )


@dataclass(frozen=True)
class SampleFinding:
    """A fault that a check found in a sample.

    row: the sample's row in its file. index: its number in the run, by which views and texts name it.
    """

    check: str
    row: int
    text: str
    index: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def mask(rows: list[Row], rules: Rules) -> Iterator[SampleFinding]:
    for number, row in enumerate(rows):
        values = row["loss_mask"]
        # In a supervised run, no model generated the conversations.
        from_model = row["spans"] or row["engine_log_probs"] is not None
        if values is None or not np.any(values) or not from_model:
            continue
        trained, generated = np.asarray(values, bool), _generated(row)
        if len(trained) != row["response_length"]:
            yield SampleFinding(
                "mask",
                number,
                f"the mask has {counted(len(trained), 'entry')}, the response {counted(len(generated), 'token')}",
            )
            continue
        foreign, missed = np.flatnonzero(trained & ~generated), np.flatnonzero(generated & ~trained)
        # Without spans a log-prob of 0 proves nothing: a model may be that sure.
        if len(foreign) and row["spans"]:
            yield SampleFinding("mask", number, f"trains on {_places(foreign)}, which the model did not generate")
        if len(missed) and not rules.masks_old:
            begins = "; the mask does not begin with the response" if missed[0] == 0 else ""
            yield SampleFinding(
                "mask", number, f"does not train on {_places(missed)}, which the model generated{begins}"
            )


def log_probs(rows: list[Row], rules: Rules) -> Iterator[SampleFinding]:
    for number, row in enumerate(rows):
        if row["engine_log_probs"] is None or row["trainer_log_probs"] is None:
            continue
        engine, trainer = (np.asarray(row[name], np.float64) for name in ("engine_log_probs", "trainer_log_probs"))
        if engine.shape != trainer.shape:
            yield SampleFinding("log_probs", number, f"{len(engine)} of the engine, {len(trainer)} of the trainer")
            continue
        far = _distance(engine, trainer)
        if not far > FAR_APART:
            continue
        text = f"engine and trainer differ by {far:.2f} on average"
        for shift, words in ((1, "one token later"), (-1, "one token earlier")):
            moved = _distance(engine[:-shift], trainer[shift:]) if shift > 0 else _distance(engine[1:], trainer[:-1])
            if moved * SHIFT_FACTOR < far:
                text += f", and by {moved:.2f} with the trainer's taken {words}"
        yield SampleFinding("log_probs", number, text)


def weights(rows: list[Row], rules: Rules) -> Iterator[SampleFinding]:
    for number, row in enumerate(rows):
        # An evaluation trains on nothing, but its samples are of the newest weights too.
        versions = [int(s["weight_version"]) for s in row["spans"] or () if str(s["weight_version"]).isdigit()]
        if versions and row["step"] - min(versions) > rules.staleness:
            yield SampleFinding(
                "weights", number,
                f"generated by weights of version {min(versions)} in step {row['step']}; "
                f"this run's may be {rules.staleness} behind",
            )  # fmt: skip
        elif versions and max(versions) > row["step"]:
            text = f"version {max(versions)} of the weights did not exist before step {row['step']}"
            yield SampleFinding("weights", number, text)


def rewards(rows: list[Row], rules: Rules) -> Iterator[SampleFinding]:
    """Finds rewards that contradict the responses of their group, whatever the reward function is."""
    groups: dict[Any, list[int]] = {}
    for number, row in enumerate(rows):
        if row["reward"] is not None and not rules.random:
            groups.setdefault((row["dataset"], row["group_index"]), []).append(number)
    for members in groups.values():
        first: dict[str, int] = {}
        for number in members:
            row = rows[number]
            other = first.setdefault(f"{row['status']} {row['response']}", number)
            if rows[other]["reward"] != row["reward"]:
                yield SampleFinding(
                    "rewards", number,
                    f"reward {row['reward']:g}, but sample {rows[other]['index']} of the group has the same response "
                    f"and {rows[other]['reward']:g}",
                )  # fmt: skip
        right = [n for n in members if rows[n]["label"] and rows[n]["response"].strip() == rows[n]["label"].strip()]
        wrong = [n for n in members if rows[n]["label"] and rows[n]["label"].strip() not in rows[n]["response"]]
        for number in right:
            better = [n for n in wrong if rows[n]["reward"] > rows[number]["reward"]]
            if better:
                yield SampleFinding(
                    "rewards", number,
                    f"its response is the label and gets {rows[number]['reward']:g}; sample {rows[better[0]]['index']} "
                    f"of the group does not contain the label and gets {rows[better[0]]['reward']:g}",
                )  # fmt: skip


def numbers(rows: list[Row], rules: Rules) -> Iterator[SampleFinding]:
    for number, row in enumerate(rows):
        tokens = 0 if row["tokens"] is None else len(row["tokens"])
        if tokens < (row["response_length"] or 0):
            text = f"{counted(tokens, 'token')}, of which {row['response_length']} respond"
            yield SampleFinding("numbers", number, text)
        engine = np.asarray(() if row["engine_log_probs"] is None else row["engine_log_probs"], np.float64)
        wrong = np.flatnonzero(engine > 1e-3)
        if len(wrong):
            yield SampleFinding("numbers", number, f"log-prob {engine[wrong[0]]:.3g} of {_places(wrong)} is above 0")
        if row["reward"] is not None and not np.isfinite(row["reward"]):
            yield SampleFinding("numbers", number, f"the reward is {row['reward']}")


# Key, title, meaning, function.
CHECKS: tuple[tuple[str, str, str, Callable[[list[Row], Rules], Iterator[SampleFinding]]], ...] = (
    ("mask", "Loss mask", "The mask covers the tokens that the model generated, from the first to the last, and no "
     "others.", mask),
    ("log_probs", "Log-probs", f"Engine and trainer agree on the log-probs of trained tokens: less than {FAR_APART:g} "
     "apart on average.", log_probs),
    ("weights", "Weight version", "Samples were generated by weights no older than the loop allows.", weights),
    ("rewards", "Rewards", "In a group, equal responses have equal rewards, and the label as the response does not "
     "lose to another.", rewards),
    ("numbers", "Numbers", "Log-probs are at most 0, rewards are finite, lengths agree.", numbers),
)  # fmt: skip
REGRADED = ("regraded", "Graded again", "The reward function gives the kept response the reward that was trained on.")


def run_checks(rows: list[Row], rules: Rules) -> list[SampleFinding]:
    return [finding for _, _, _, check in CHECKS for finding in check(rows, rules)]


def _generated(row: Row) -> np.ndarray:
    """Returns [R] bool: the tokens that a model generated, by their spans or else by the engine's log-probs."""
    generated = np.zeros(row["response_length"] or 0, bool)
    for span in row["spans"] or ():
        generated[span["start"] : span["end"]] = True
    engine = row["engine_log_probs"]
    if not row["spans"] and engine is not None and len(engine) == len(generated):
        generated = np.asarray(engine) != 0
    return generated


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the mean distance over tokens that both have; NaN if there are none."""
    known = np.isfinite(a) & np.isfinite(b)
    return float(np.abs(a - b)[known].mean()) if known.any() else float("nan")


def _places(places: np.ndarray) -> str:
    if len(places) == 1:
        return f"response token {places[0]}"
    return f"{counted(len(places), 'response token')} ({places[0]} to {places[-1]})"
