"""The report of a run: lines on the terminal, and files in its output directory."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from slime.launcher.metrics.files import Metrics, MetricsLog, is_evaluation, plot_reward
from slime.launcher.metrics.printable import printable
from slime.launcher.metrics.silence import SilenceWatch
from slime.launcher.metrics.sinks.base import Sink
from slime.launcher.run_directory.kept_samples import DIRECTORY as SAMPLES
from slime.launcher.run_directory.kept_samples import KeptSamples
from slime.launcher.run_directory.state import RunState
from slime.rollout.prompts.encoder import unrendered
from slime.types import Sample
from slime.types.errors import SlimeError, counted
from slime.types.files import write_whole

# Metrics that count rejected prompts; the first rejection is printed.
LEFT_OUT = ("rollout/prompt_too_long", "rollout/prompt_unusable")
COLUMNS = (
    # heading, key, format
    ("step", "step", "{:.0f}"),
    ("reward", "rollout/raw_reward", "{:.3f}"),
    ("length", "rollout/response_lengths", "{:.1f}"),
    ("tok/s", "perf/tokens_per_second", "{:.0f}"),
    ("loss", "train/loss", "{:+.4f}"),
    ("grad norm", "train/grad_norm", "{:.3f}"),
    ("generate s", "perf/rollout_time", "{:.2f}"),
    ("train s", "perf/train_time", "{:.2f}"),
    ("sync s", "perf/update_weights_time", "{:.2f}"),
    ("step s", "perf/step_time", "{:.2f}"),
)
SHOWN_EXAMPLES = 3
REWARD = "rollout/raw_reward"
# Samples of the first evaluation.
EXAMPLES = "eval_samples.json"
# Keys of an evaluation set besides its score.
DETAIL = re.compile(
    r"-(truncated_ratio|response_length|pass@\d+|prompt_(too_long|unusable)|accuracy|n_samples|failed)$"
)


class Report:
    """Collects the metrics of a run; prints progress, writes the files of `output_dir`.

    num_steps: iterations of the run; None if `started` gets the number.
    sinks: further receivers of all metrics.
    print_every: number of steps per printed line (None: chosen so that a run prints about 40).
    state: gets the current activity.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        num_steps: int | None,
        sinks: Sequence[Sink] = (),
        print_every: int | None = None,
        console: Console | None = None,
        state: RunState | None = None,
    ) -> None:
        self.output_dir = output_dir
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.next_command = ""
        self._print_every = print_every
        self._state = state
        self._num_steps = num_steps or 0
        self._first_step = 0
        self._trains = True
        self._warned_of_prompts = False
        self._status: Status | None = None
        self._rewards: dict[int, float] = {}
        self._evaluations: dict[str, list[tuple[int, float]]] = {}
        self._examples: list[tuple[int, list[Sample]]] = []
        output_dir.mkdir(parents=True, exist_ok=True)
        self._sinks = list(sinks)
        self._log: MetricsLog | None = None
        self._samples: KeptSamples | None = None
        self.watch = SilenceWatch()
        self.log_samples = True

    def __enter__(self) -> Report:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._clear_status()
        try:
            if self._samples is not None:
                self._samples.wait()
        except SlimeError:
            # A run that fails tells why it does.
            if kind is None:
                raise
        finally:
            for sink in self._sinks:
                sink.close(failed=kind is not None)

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def attach(self, sink: Sink) -> None:
        """Adds a sink, which gets all metrics from now on and is closed with the report."""
        self._sinks.append(sink)

    def status(self, text: str) -> None:
        """Shows the current activity; on a terminal it replaces the previous line."""
        if self._state is not None:
            self._state.phase(text)
        if not self.console.is_terminal:
            return
        if self._status is None:
            self._status = self.console.status(text)
            self._status.start()
        self._status.update(text)

    def progress(self, phase: str, done: int, total: int) -> None:
        self.status(f"{phase} {done}/{total}" if total else phase)

    @property
    def has_begun(self) -> bool:
        """True once all services run."""
        return self._log is not None

    def started(self, num_parameters: int | None, first_step: int, num_steps: int | None = None) -> None:
        """Prints the first lines. num_parameters: None if nothing is trained."""
        self._num_steps = self._num_steps if num_steps is None else num_steps
        self._first_step = first_step
        self._trains = num_parameters is not None and self._num_steps > 0
        if self._state is not None:
            self._state.phase("started", num_steps=self._num_steps)
        resumed = f", from step {first_step}" if first_step else ""
        size = "no trainer" if num_parameters is None else f"{num_parameters / 1e6:,.2f} M parameters"
        plan = f"{size}, {counted(self._num_steps, 'step')}{resumed}" if self._num_steps else "evaluation only"
        self._print(f"{plan}; files in {self.output_dir}, tokens in its access/")
        # A run that only evaluates appends to the metrics of the earlier run.
        written_from = first_step if self._num_steps > 0 else None
        self._log = MetricsLog(self.output_dir / "metrics.jsonl", written_from)
        self._samples = KeptSamples(self.output_dir, written_from)
        rows = self._log.rows()
        if written_from is not None:
            self._start_sinks(rows, written_from)
        self._read_back(rows, first_step)
        self._first = True

    def _start_sinks(self, rows: list[dict[str, Any]], first_step: int) -> None:
        assert self._log is not None
        evaluations = [_values(row) for row in rows if row["step"] == first_step and is_evaluation(row)]
        for sink in self._sinks:
            sink.start(first_step, evaluations[-1] if evaluations else None)
        if self._log.restored is not None:
            self._write(self._log.restored["step"], _values(self._log.restored))

    def _read_back(self, rows: list[dict[str, Any]], first_step: int) -> None:
        """Reads back the metrics of earlier starts of the run, and their first samples."""
        for row in rows:
            if is_evaluation(row):
                # A score that was not finite is null in the file.
                self._note_scores(row["step"], {key: value for key, value in row.items() if value is not None})
            elif row.get(REWARD) is not None:
                self._rewards[row["step"]] = row[REWARD]
        path = self.output_dir / EXAMPLES
        if rows and path.is_file():
            first = json.loads(path.read_text())
            if first["step"] <= first_step:
                self._examples = [(first["step"], [Sample(**fields) for fields in first["samples"]])]

    def _note_scores(self, step: int, metrics: Metrics) -> dict[str, float]:
        scores = evaluation_scores(metrics)
        for name, score in scores.items():
            points = self._evaluations.setdefault(name, [])
            points[:] = sorted([*(point for point in points if point[0] != step), (step, score)])
        return scores

    def lacks_evaluation(self, step: int) -> bool:
        """Returns whether an earlier start of the run left metrics, but not of an evaluation after `step` steps."""
        assert self._log is not None, "started() comes first"
        rows = self._log.rows()
        return bool(rows) and not any(row["step"] == step and is_evaluation(row) for row in rows)

    def evaluation(self, step: int, metrics: Metrics, examples: list[Sample]) -> None:
        """Records held-out scores after `step` steps; the metrics of the last step must have been recorded before."""
        assert self._log is not None and self._samples is not None, "started() comes first"
        for name, score in self._note_scores(step, metrics).items():
            self._print(f"held-out evaluation of {name}{self._after(step)}: {score:.3f}")
        if not self._examples:
            self._write_examples(step, examples)
        self._examples = [*self._examples[:1], (step, examples)]
        self._log.append_evaluation(step, metrics)
        if self.log_samples:
            self._samples.write(step, examples, evaluation=True)
        self._write(step, metrics)
        self._write_evaluations()

    def note(self, text: str) -> None:
        self._print(text)

    def hold(self, step: int, metrics: Metrics) -> None:
        """Keeps the metrics of a step before its checkpoint is written, in case the run ends before `step`."""
        assert self._log is not None, "started() comes first"
        self._log.hold(step, metrics)

    def step(self, step: int, metrics: Metrics, samples: list[Sample]) -> None:
        """Records an iteration. samples: some of those that were trained on."""
        assert self._log is not None and self._samples is not None, "started() comes first"
        self._log.append(step, metrics)
        if self.log_samples:
            self._samples.begin(step, samples)
        self._write(step, metrics)
        if REWARD in metrics:  # missing when groups of an earlier start are trained on again
            self._rewards[step] = metrics[REWARD]
        if self._first:
            self._print("  ".join(f"{heading:>10}" for heading, _, _ in COLUMNS))
            self._first = False
        if step % (self._print_every or max(1, self._num_steps // 40)) == 0 or step == self._num_steps - 1:
            row = metrics | {"step": float(step)}
            self._print("  ".join(f"{form.format(row[key]) if key in row else '-':>10}" for _, key, form in COLUMNS))
        reasons = self.output_dir / "logs" / "rollout.log"
        left_out = {name: int(metrics.get(name, 0)) for name in LEFT_OUT}
        if any(left_out.values()) and not self._warned_of_prompts:
            self._warned_of_prompts = True
            counts = ", ".join(f"{name} {count}" for name, count in left_out.items() if count)
            self._print(f"WARNING: step {step} left out prompts ({counts}); the reasons are in {reasons}")
        if metrics.get("rollout/failed_ratio") == 1:
            self._print(f"step {step}: every sample failed, so nothing was trained on; the reasons are in {reasons}")
        elif warning := self.watch.look(step, metrics, samples, self.output_dir):
            self._print(warning)

    def _write(self, step: int, metrics: Metrics) -> None:
        for sink in self._sinks:
            sink.write(step, metrics)

    def finished(self) -> None:
        """Prints the closing table, samples before and after, and the paths of the results; draws the plot."""
        self._clear_status()
        if self._samples is not None:
            self._samples.wait()
        plot = self.output_dir / "reward.png"
        plot_reward(plot, list(self._rewards), list(self._rewards.values()), self._evaluations)
        values = list(self._rewards.values())
        table = Table("", *(("before", "after") if self._trains or values else ("score",)), title="reward")
        if values:
            count = min(3, len(values))
            means = (f"{sum(part) / count:.3f}" for part in (values[:count], values[-count:]))
            table.add_row(f"rollouts, {counted(count, 'step')}", *means)
        for name, points in self._evaluations.items():
            ends = [self._before(points), points[-1][1]] if self._trains or values else [points[-1][1]]
            table.add_row(f"held out: {name}", *("-" if score is None else f"{score:.3f}" for score in ends))
        self.console.print(table)
        self._print_examples()
        self._print(f"plot          {plot}")
        self._print(f"metrics       {self.output_dir / 'metrics.jsonl'}")
        if self.log_samples:
            self._print(f"samples       {self.output_dir / SAMPLES}")
        self._print(f"look at it    slime show {shlex.quote(str(self.output_dir))}")
        if self._trains:
            self._print(f"trained model {self.output_dir / 'model'}")
            if self.next_command:
                self._print(f"\ntry next:\n  {self.next_command}")

    def _print_examples(self) -> None:
        if not self._examples:
            return
        (first, before), (last, after) = self._examples[0], self._examples[-1]
        for old, new in list(zip(before, after, strict=False))[:SHOWN_EXAMPLES]:
            self._print(
                f"\nprompt  {printable(_prompt_text(old))}"
                + (f"   (answer: {printable(str(old.label))})" if old.label is not None else "")
            )
            shown = [(first, old), (last, new)] if first != last else [(last, new)]
            for step, sample in shown:
                when = f"after step {step:<4} " if self._after(step) else ""
                self._print(f"  {when}reward {_reward(sample)}  {sample.response!r}")
        self._print("")

    def _write_examples(self, step: int, examples: list[Sample]) -> None:
        """Writes the samples from before training, which the end of the run shows, perhaps in a later start."""
        names = ("prompt", "response", "label", "reward")
        samples = [{name: getattr(sample, name) for name in names} for sample in examples[:SHOWN_EXAMPLES]]
        write_whole(self.output_dir / EXAMPLES, json.dumps({"step": step, "samples": samples}, default=str) + "\n")

    def _write_evaluations(self) -> None:
        sets: dict[str, dict[str, Any]] = {
            name: {
                "before": self._before(points),
                "after": points[-1][1],
                "history": [{"step": s, "score": v} for s, v in points],
            }
            for name, points in self._evaluations.items()
        }
        if sets:
            mean = {when: _mean([each[when] for each in sets.values()]) for when in ("before", "after")}
            write_whole(self.output_dir / "eval.json", json.dumps(mean | {"sets": sets}, indent=2) + "\n")

    def _before(self, points: Sequence[tuple[int, float]]) -> float | None:
        """Returns the score from before the first iteration of the run; None where nothing was evaluated then."""
        step, score = points[0]
        return score if step <= min([self._first_step, *self._rewards]) else None

    def _after(self, step: int) -> str:
        """Returns ` after N steps`; nothing where the run only evaluates a model, whose steps it does not know."""
        return f" after {counted(step, 'step')}" if step or self._num_steps else ""

    def _print(self, text: str) -> None:
        self.console.print(escape(text), soft_wrap=True)

    def _clear_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def _mean(scores: Sequence[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if len(known) == len(scores) else None


def evaluation_scores(metrics: Metrics) -> dict[str, float]:
    """Returns the score of each set: the metrics "eval/NAME" for which there are details "eval/NAME-DETAIL".

    If there are none, returns all metrics that are not details: a user's evaluation function need not report details.
    """
    names = {key.removeprefix("eval/") for key in metrics if key.startswith("eval/")}
    details = {name for name in names if DETAIL.search(name)}
    scores = {DETAIL.sub("", name) for name in details} & names or names - details
    return {name: metrics[f"eval/{name}"] for name in sorted(scores)}


def _values(row: dict[str, Any]) -> Metrics:
    """Returns the metrics of a row of metrics.jsonl, without those that were not finite, which are null there."""
    return {key: value for key, value in row.items() if key != "step" and value is not None}


def _prompt_text(sample: Sample) -> str:
    """Returns the prompt, or the text of its last message, with <image> in place of images."""
    prompt = unrendered(sample)
    content = prompt if isinstance(prompt, str) else prompt[-1].get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or f"<{part.get('type')}>") for part in content)


def _reward(sample: Sample) -> str:
    return f"{sample.reward:.2f}" if isinstance(sample.reward, (int, float)) else str(sample.reward)
