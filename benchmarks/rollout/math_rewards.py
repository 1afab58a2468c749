"""Answers a second that `--rm-type math` grades, with and without hopeless answers among them.

python benchmarks/rollout/math_rewards.py --answers 2000
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time

from slime.rollout.rewards.built_in.math import pool
from slime.types import Sample

# Responses and labels as models of mathematics write them: most are compared as text, some by sympy.
ORDINARY = [
    (r"so 6 x 7 = 42. The answer is \boxed{42}", "42"), (r"Thus \boxed{\frac{3}{4}}.", "0.75"),
    (r"\boxed{x^2-1}", "(x-1)(x+1)"), (r"The result is \boxed{(1,2]}", "[1,2]"), (r"\boxed{\sqrt{8}}", r"2\sqrt{2}"),
    (r"We get \boxed{\frac{\pi}{2}}", r"\frac{\pi}{3}"), (r"\boxed{\{1,2,3\}}", r"\{3,2,1\}"),
    ("It follows that the sum is $17$", "17"), (r"\boxed{1{,}024}", "1024"), (r"\boxed{x=5}", "5"),
]  # fmt: skip
HOPELESS = r"\boxed{9^{9^{9^{9}}}}", "7"


async def grade(answers: list[tuple[str, str]]) -> tuple[float, list[float]]:
    """Returns (seconds until all but the hopeless ones have a reward, seconds that each of these took)."""
    started = time.perf_counter()

    async def one(response: str, label: str) -> float:
        await pool.reward(None, Sample(response=response, label=label))
        return time.perf_counter() - started

    tasks = [(asyncio.create_task(one(*answer)), answer == HOPELESS) for answer in answers]
    taken = [await task for task, hopeless in tasks if not hopeless]
    await asyncio.gather(*(task for task, _ in tasks))
    return max(taken), taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    ordinary = [
        (f"{text} ({i})", label) for i in range(options.answers) for text, label in [ORDINARY[i % len(ORDINARY)]]
    ]
    asyncio.run(grade(ordinary[: 4 * len(ORDINARY)]))
    print("| hopeless among them | answers/s, best | all rounds |\n|---|---|---|")
    for hopeless in (0, 1, 8):
        mixed = [*ordinary, *[HOPELESS] * hopeless]
        random.Random(0).shuffle(mixed)
        speeds = [options.answers / asyncio.run(grade(mixed))[0] for _ in range(options.repeats)]
        print(f"| {hopeless} | {max(speeds):,.0f} | {', '.join(f'{speed:,.0f}' for speed in speeds)} |")


if __name__ == "__main__":
    main()
