"""`--rm-type math`: answers that people agree on, and what hopeless answers cost the others."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from slime.rollout.rewards import score_sample
from slime.rollout.rewards.boxed import last_boxed
from slime.rollout.rewards.built_in.math import pool as math_reward
from slime.rollout.rewards.built_in.math.pool import MathPool
from slime.types import Sample
from slime.types.errors import EngineError, InvalidField

# Response, label, reward.
CASES = [
    (r"\boxed{41}. Wait... \boxed{42}", "42", 1),
    (r"\boxed{42}. Wait... \boxed{41}", "42", 0),
    (r"The answer is 42. \boxed{41}", "42", 0),
    (r"\boxed{42} is it, as 41 + 1 = 42, not 43.", "42", 1),
    (r"so \boxed{42", "42", 0),
    (r"\boxed{42} or \boxed{4", "42", 0),
    (r"\boxed{}", "42", 0),
    ("", "42", 0),
    (r"\boxed {42}", "42", 1),
    (r"\fbox{42}", "42", 1),
    (r"$$\boxed{42}$$", "42", 1),
    (r"\boxed{42}", r"\boxed{42}", 1),
    (r"\boxed{\boxed{42}}", "42", 1),
    ("The answer is 42.", "42", 1),
    (r"The answer is $\frac{1}{2}$.", "0.5", 1),
    ("41", "42", 0),
    ("I do not know.", "42", 0),
    (r"\boxed{5.}", "5", 1),
    (r"\boxed{5}", "5.", 1),
    (r"\boxed{5.0}", "5", 1),
    (r"\boxed{05}", "5", 1),
    (r"\boxed{1 000}", "1000", 1),
    (r"\boxed{1000}", "1 000", 1),
    (r"\boxed{1\,000}", "1000", 1),
    (r"\boxed{1,000}", "1000", 1),
    (r"\boxed{1{,}000}", "1000", 1),
    (r"\boxed{1,000,000}", "1000000", 1),
    (r"\boxed{12 345 678}", "12345678", 1),
    (r"\boxed{1e3}", "1000", 1),
    (r"\boxed{1000}", "1e3", 1),
    (r"\boxed{2.5e-3}", "0.0025", 1),
    (r"\boxed{1e3}", "1001", 0),
    (r"\boxed{10^3}", "1000", 1),
    (r"\boxed{3 \times 10^5}", "300000", 1),
    (r"\boxed{3 × 10^5}", "300000", 1),
    (r"\boxed{-5}", "5", 0),
    (r"\boxed{−5}", "-5", 1),
    (r"\boxed{\varnothing}", r"\emptyset", 1),
    (r"\boxed{\emptyset}", r"\varnothing", 1),
    (r"\boxed{\{\}}", r"\emptyset", 1),
    (r"\boxed{∅}", r"\varnothing", 1),
    (r"\boxed{\varnothing}", "0", 0),
    (r"\boxed{\frac{1}{2}}", "0.5", 1),
    (r"\boxed{\dfrac12}", "1/2", 1),
    (r"\boxed{\tfrac{1}{2}}", "0.5", 1),
    (r"\boxed{1/2}", r"\frac{1}{2}", 1),
    (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", 1),
    (r"\boxed{-\frac{1}{2}}", r"\frac{-1}{2}", 1),
    (r"\boxed{2\frac{1}{2}}", "2.5", 1),
    (r"\boxed{0.333}", r"\frac{1}{3}", 0),
    (r"\boxed{0.3}", "0.30", 1),
    (r"\boxed{\frac{1}{3}}", r"\frac{1}{2}", 0),
    (r"\boxed{5 \text{ cm}}", "5", 1),
    (r"\boxed{5\text{ cm}}", r"5 \text{ cm}", 1),
    (r"\boxed{5\,\mathrm{cm}}", "5", 1),
    (r"\boxed{90^\circ}", "90", 1),
    (r"\boxed{90}", r"90^{\circ}", 1),
    (r"\boxed{90°}", "90", 1),
    (r"\boxed{50\%}", "50", 1),
    (r"\boxed{50\%}", r"50\%", 1),
    (r"\boxed{50%}", "50", 1),
    (r"\boxed{\$5}", "5", 1),
    (r"\boxed{\$5.00}", "5", 1),
    (r"\boxed{6 \text{ cm}}", "5", 0),
    (r"\boxed{(1,2]}", "(1,2]", 1),
    (r"\boxed{(1,2]}", "[1,2]", 0),
    (r"\boxed{\left(1, 2\right]}", "(1,2]", 1),
    (r"\boxed{[0,\infty)}", r"[0, \infty)", 1),
    (r"\boxed{(-\infty,1)\cup(2,\infty)}", r"(2,\infty)\cup(-\infty,1)", 1),
    (r"\boxed{x \in [0,1]}", "[0,1]", 1),
    (r"\boxed{(0,1)}", "(1,0)", 0),
    (r"\boxed{(-∞,∞)}", r"(-\infty,\infty)", 1),
    (r"\boxed{\{1,2\}}", r"\{2,1\}", 1),
    (r"\boxed{\{1,2,3\}}", r"\{1,2\}", 0),
    (r"\boxed{\left\{1,2\right\}}", r"\{1, 2\}", 1),
    (r"\boxed{1, 2}", "2, 1", 1),
    (r"\boxed{\{1\}}", "1", 1),
    (r"\boxed{(1,2)}", "(1, 2)", 1),
    (r"\boxed{(1,2)}", "(2,1)", 0),
    (r"\boxed{(1,2,3)}", "(1,2)", 0),
    (r"\boxed{\left(\frac12, 3\right)}", "(0.5, 3)", 1),
    (r"\boxed{x=5}", "5", 1),
    (r"\boxed{5}", "x=5", 1),
    (r"\boxed{x = 5}", "6", 0),
    (r"\boxed{y=2x+1}", "2x+1", 1),
    (r"\boxed{2x+1}", "1+2x", 1),
    (r"\boxed{(x-1)(x+1)}", "x^2-1", 1),
    (r"\boxed{x^2}", "x^3", 0),
    (r"\boxed{\sqrt{2}/2}", r"\frac{1}{\sqrt{2}}", 1),
    (r"\boxed{\sqrt2}", r"\sqrt{2}", 1),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1),
    (r"\boxed{\sqrt{2}}", "1.41", 0),
    (r"\boxed{2^{10}}", "1024", 1),
    (r"\boxed{\pi}", "π", 1),
    (r"\boxed{2\pi}", r"\pi \cdot 2", 1),
    (r"\boxed{\pi}", "3.14", 0),
    (r"\boxed{e^{\ln 3}}", "3", 1),
    (r"\boxed{5!}", "120", 1),
    (r"\boxed{\infty}", r"\infty", 1),
    (r"\boxed{-\infty}", r"\infty", 0),
    (r"\boxed{1 \pm \sqrt{2}}", r"1-\sqrt{2}, 1+\sqrt{2}", 1),
    (r"\boxed{3+4i}", "4i+3", 1),
    (r"\boxed{\frac{\pi}{6}}", r"\pi/6", 1),
    (r"\boxed{\log_2 8}", "3", 1),
    (r"\boxed{\binom{5}{2}}", "10", 1),
    (r"\boxed{|{-3}|}", "3", 1),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", 1),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}2\\1\end{pmatrix}", 0),
    (r"\boxed{\text{(A)}}", "A", 1),
    (r"\boxed{A}", "(A)", 1),
    (r"\boxed{\textbf{(B)}}", "B", 1),
    (r"\boxed{A}", "B", 0),
    (r"\boxed{\text{Monday}}", "monday", 1),
    (r"\boxed{\text{no solution}}", "No solution", 1),
    (r"\boxed{\text{yes}}", "no", 0),
    (r"\boxed{\text{even}}", r"\text{odd}", 0),
    (r"\boxed{\mathrm{A}}", "A", 1),
    (r"\boxed{1:2}", "1:2", 1),
    (r"\boxed{\text{13}}", "13", 1),
    (r"\boxed{x+1.}", "1+x", 1),
    (r"\boxed{$42$}", "42", 1),
    (r"\boxed{42\ }", "42", 1),
    (r"\boxed{n=3 \text{ or } n=4}", "3, 4", 1),
    (r"\boxed{7 }", "7", 1),
    (r"\boxed{seven}", "7", 0),
    (r"\boxed{1.0001}", "1", 0),
    (r"\boxed{100000000000000000001}", "100000000000000000000", 0),
    (r"\boxed{ab}", "ba", 1),
    (r"\boxed{x}", "y", 0),
    (r"\boxed{\text{ab}}", r"\text{ba}", 0),
    (r"\boxed{xyz}", "zyx", 1),
]


async def rewards_of(cases: list[tuple[str, str]]) -> list[float]:
    return await asyncio.gather(*(math_reward.reward(None, Sample(response=r, label=label)) for r, label in cases))


def test_the_last_box_is_the_answer_and_what_means_the_same_is_right():
    got = asyncio.run(rewards_of([(response, label) for response, label, _ in CASES]))
    wrong = [(*case, reward) for case, reward in zip(CASES, got, strict=True) if reward != case[2]]
    assert len(CASES) >= 66 and not wrong


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{1} b \boxed{\frac{1}{2}} c", r"\frac{1}{2}"),
        (r"\boxed{\left\{1,2\right\}} \} }", r"\left\{1,2\right\}"),
        (r"\boxed{\{1}", r"\{1"),
        (r"\fbox {7}", "7"),
        (r"\boxed{1} \boxed{open", None),
        ("nothing", None),
    ],
)
def test_the_last_box(text: str, box: str | None) -> None:
    assert last_boxed(text) == box


HOPELESS = [r"\boxed{9^{9^{9}}}", r"\boxed{10^{10^{10}}!}", r"\boxed{%s}" % ("\\sqrt{" * 200 + "2" + "}" * 200)]


def test_a_hopeless_answer_delays_no_other(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[Any] = []

    async def one(name: Any, response: str, label: str) -> float:
        reward = await math_reward.reward(None, Sample(response=response, label=label))
        ended.append(name)
        return reward

    async def work() -> list[float]:
        await one("warm", r"\boxed{1}", "1")
        hopeless = [asyncio.create_task(one("hopeless", HOPELESS[0], "3"))]
        others = [asyncio.create_task(one(i, rf"\boxed{{\frac{{{i}}}{{7}}}}", f"{i}/7")) for i in range(24)]
        return [await task for task in [*hopeless, *others]]

    with caplog.at_level(logging.WARNING):
        rewards = asyncio.run(work())
    assert rewards == [0.0] + [1.0] * 24 and ended[-1] == "hopeless"
    assert all(len(record.getMessage()) < 400 for record in caplog.records)


def test_many_hopeless_answers_are_said_in_one_line(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(math_reward, "_given_up_answers", math_reward._GivenUp())
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            math_reward._given_up("x" * 10_000 + "end")
    (record,) = caplog.records
    assert "1 answer could" in record.getMessage() and record.getMessage().endswith("end'")


def test_what_needs_too_much_time_or_memory_has_no_answer_and_the_worker_goes_on():
    pool = MathPool(0.5, niceness=0, size=1)
    try:
        assert pool.score(r"\boxed{1}", "1") == 1.0
        pid = pool._workers[0]._process.pid  # type: ignore[union-attr]
        for answer in HOPELESS:
            assert pool.score(answer, "3") in (None, 0.0)
        assert pool.score(r"\boxed{2}", "2") == 1.0 and pool._workers[0]._process.pid == pid  # type: ignore[union-attr]
        assert pool.score(r"\boxed{%s}" % ("1" * 2000), "1" * 2000) == 0.0, "longer than an answer is"
    finally:
        pool.stop()


def test_a_worker_that_cannot_start_says_why(monkeypatch: Any, tmp_path: Any) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('no antlr here')")
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = MathPool(0.5, niceness=0, size=1)
    with pytest.raises(EngineError, match="did not start: ImportError: no antlr here"):
        pool.score("1", "1")


@pytest.mark.parametrize("rm_type", ["math", "boxed_math", "integer", "exact_partial"])
def test_a_sample_without_a_label_is_named(rm_type: str) -> None:
    from argparse import Namespace

    args = Namespace(rm_type=rm_type, custom_rm_path=None, reward_key=None)
    sample = Sample(index=5, response="7", status=Sample.Status.COMPLETED)
    with pytest.raises(InvalidField, match="sample 5 .*has no label.*--label-key"):
        asyncio.run(score_sample(args, sample))
    if rm_type == "integer":
        sample.label = "seven"
        with pytest.raises(InvalidField, match="sample 5 has the label 'seven', expected an integer"):
            asyncio.run(score_sample(args, sample))
