"""The process that runs math-verify: JSON lines {"response", "label"} in, {"reward"} out; ends with its input."""

from __future__ import annotations

import json
import os
import signal
import sys


def compare(response: str, label: str) -> float:
    from math_verify import parse, verify

    gold = parse(label if "\\boxed" in label or "$" in label else f"${label}$")
    return float(bool(gold) and verify(gold, parse(response)))


def main() -> None:
    # Ctrl-C is for the service, which ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Whatever a library prints must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import math_verify  # noqa: F401

    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps({"reward": compare(question["response"], question["label"])}), file=answers, flush=True)


if __name__ == "__main__":
    main()
