"""`slime eval`: scores a model on data sets as a training run evaluates it."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from slime.launcher.cli.recorded_run import RecordedRun, is_run, no_run_or_model, read_run
from slime.launcher.config.help import CommandParser
from slime.launcher.hub.names import dataset_name, model_name
from slime.launcher.run_directory.checkpoints import held
from slime.types.directories import path_errors
from slime.types.errors import ConfigError, InvalidSetting, SlimeError
from slime.types.files import check_readable, whole_file, write_whole
from slime.types.prompt_files.slices import split_slice
from slime.types.setting_values import named_path

if TYPE_CHECKING:
    from slime.launcher.config.run_config import RunConfig

DIRECTORY = Path("evaluations")
ROWS, SCORES = "rows.jsonl", "scores.json"
# Files that hold settings and attributes for the evaluation of a run, and the recording that becomes ROWS.
SETTINGS_OF_RUN, ATTRIBUTES, RECORDED = "settings.yaml", "plugins.yaml", "recorded-{rollout_id}"
HEADER = "# Written by `slime eval`, with what it took from the run.\n"
SETS = ("--eval-prompt-data", "--eval-config")
# Settings of the packages that evaluate which do not affect an evaluation.
LEFT_OUT = (
    "prompt_data", "hf_checkpoint", "rollout_function_path", "partial_rollout", "mask_offpolicy_in_partial_rollout",
    "over_sampling_batch_size", "buffer_dir", "buffer_store", "buffer_payloads", "data_place",
    "save_debug_rollout_data", "load_forge_rollout_data", "offload_rollout", "rollout_global_dataset",
    "data_source_path",
)  # fmt: skip
# With --colocate the engines use the trainer's GPUs, so these settings give their number.
GPUS = ("actor_num_nodes", "actor_num_gpus_per_node")


class Score(NamedTuple):
    """The mean reward of a set. error: standard error of the mean over prompts; NaN for a single prompt."""

    mean: float
    error: float
    prompts: int
    samples: int


def parser(command: str) -> CommandParser:
    reader = CommandParser(
        prog="slime eval",
        usage="slime eval RUN|MODEL [DATA] [--json] [flags of slime train]",
        description="Scores a model on data and prints the mean with its standard error over prompts. RUN evaluates "
        "the trained model with the reward, columns and lengths of that run, on its evaluation sets or on DATA. MODEL, "
        "a directory or a name on the Hub, needs DATA and flags such as --rm-type, --input-key and --label-key. "
        "--n-samples-per-eval-prompt and --eval-temperature set the sampling. Every response is a row of "
        f"{ROWS} below --output-dir (default: {DIRECTORY}/NAME-TIME).",
    )
    reader.add_argument("--json", action="store_true", help="Print the scores as JSON; everything else on stderr")
    reader.add_argument("--output-dir", type=named_path, metavar="DIR", help="Directory of the rows, scores and logs")
    return reader


def main(command: str, argv: Sequence[str]) -> int:
    try:
        from slime.launcher.metrics.sinks.wandb import take_key

        return evaluate(take_key(argv))
    except SlimeError as error:
        print(f"slime: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def evaluate(argv: list[str]) -> int:
    """Evaluates and prints the scores; returns the exit code. Raises the errors of `slime train`'s flags."""
    from slime.launcher.config import run_config

    count = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    places, rest = argv[:count], argv[count:]
    options, flags = parser("eval").parse_known_args(rest)
    if not places:
        raise InvalidSetting.required("RUN|MODEL", "the run or the model to evaluate comes first")
    if len(places) > 2:
        raise InvalidSetting(f"unexpected argument {places[2]!r}", value=places[2])
    model, data = places[0], (places[1] if len(places) == 2 else None)
    named = {word.split("=", 1)[0] for word in flags} & set(SETS)
    if data is not None and named:
        raise InvalidSetting.conflict(f"DATA {data}", min(named), "both name what to evaluate on")
    run = read_run(Path(model)) if is_run(Path(model)) else None
    if run is None:
        found = (Path(model) / "config.json").is_file() if Path(model).exists() else model_name(model) is not None
        if not found:
            raise no_run_or_model(Path(model))
    if run is None and data is None and not named:
        raise InvalidSetting.required("DATA", "a model alone has no evaluation sets")
    if data is not None:
        path, _ = split_slice(data, "DATA")
        if dataset_name(path) is None:
            check_readable(path, "DATA")

    name = Path(model).resolve().name if Path(model).exists() else model.rpartition("/")[2]
    output = options.output_dir or DIRECTORY / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    _check_own(output)
    with_sets = not (data or named)
    # The user did not type these here, so a setting of the run that an evaluation does not read is not an error.
    inherited = () if run is None else evaluation_settings(run, with_sets=with_sets)
    with ExitStack() as reading:
        if run is not None:
            # A run that goes on may delete its checkpoints.
            model = str(reading.enter_context(held(run.model)))
        # Raises for wrong flags, before anything is written; the run itself would print the error and return.
        with tempfile.TemporaryDirectory(prefix="slime-eval-") as place:
            words = words_of(model, run, data, flags, output, with_sets=with_sets, place=Path(place))
            config = run_config.parse(words, inherited=inherited)
        words = words_of(model, run, data, flags, output, with_sets=with_sets)
        return _run(words, config, output, inherited, as_json=options.json)


def _check_own(output: Path) -> None:
    """Raises InvalidSetting for a directory with anything else than an earlier evaluation.

    Its scores and settings would be replaced, or mixed with those of a run.
    """
    with path_errors(output, "--output-dir"):
        files = list(output.iterdir()) if output.is_dir() else []
        own = not output.exists() or (output.is_dir() and all(map(_is_own, files)))
    if is_run(output):
        settings = read_run(output).settings
        recorded = str(settings.get("save_debug_rollout_data"))
        own = settings.get("num_rollout") == 0 and recorded.endswith(RECORDED)
    if not own:
        expected = "a new or an empty directory, or one of an earlier evaluation"
        raise InvalidSetting.must_be("--output-dir", expected, got=str(output))


def _is_own(path: Path) -> bool:
    """Returns whether `path` is what an evaluation that never started leaves in its directory."""
    named = path.name in (SETTINGS_OF_RUN, ATTRIBUTES) and path.is_file()
    return named and path.read_bytes().startswith(HEADER.encode())


def words_of(
    model: str, run: RecordedRun | None, data: str | None, flags: Sequence[str], output: Path, *,
    with_sets: bool = True, place: Path | None = None,
) -> list[str]:  # fmt: skip
    """Returns the arguments of `slime train` that evaluate `model`, which may be one of `run`.

    with_sets: keep the run's evaluation sets. place: directory of the files that hold settings of the run; `output`
    by default.
    """
    place = output if place is None else place
    settings = {} if run is None else evaluation_settings(run, with_sets=with_sets)
    if run is not None and with_sets and not settings.keys() & {"eval_prompt_data", "eval_config"}:
        raise InvalidSetting.required("DATA", f"RUN {run.path} had no evaluation sets")
    words = ["--hf-checkpoint", model, "--num-rollout", "0", "--debug-rollout-only", "--log-samples", "0"]
    words += ["--output-dir", str(output), "--save-debug-rollout-data", str(output / RECORDED)]
    if data is not None:
        words += ["--eval-prompt-data", data]
    if settings:
        with path_errors(output, "--output-dir"):
            place.mkdir(parents=True, exist_ok=True)
        write_whole(place / SETTINGS_OF_RUN, HEADER + yaml.safe_dump(settings, sort_keys=True))
        words = ["--config", str(place / SETTINGS_OF_RUN), *words]
    if run is not None and (attributes := plugin_attributes(run)):
        write_whole(place / ATTRIBUTES, HEADER + yaml.safe_dump(attributes, sort_keys=True))
        words += ["--custom-config-path", str(place / ATTRIBUTES)]
    return [*words, *flags]


def evaluation_settings(run: RecordedRun, *, with_sets: bool = True) -> dict[str, Any]:
    """Returns the settings of a run that decide how it evaluates, with absolute paths."""
    from slime.launcher.config.catalogue import FAMILIES, declared

    flags = declared()
    settings = run.settings
    left_out = {*LEFT_OUT, *(() if with_sets else ("eval_prompt_data",))}
    kept: dict[str, Any] = {}
    for name, value in settings.items():
        flag = flags.get(name)
        of_family = flag is None and any(family.read_key(name, value) is not None for family in FAMILIES)
        decides = flag is not None and {"buffer", "rollout"} & {*flag.packages} and name not in left_out
        of_engines = name in GPUS and settings.get("colocate")
        if of_family or decides or of_engines or (name == "eval_config" and with_sets):
            kept[name] = run.absolute(name, value)
    function = settings.get("rollout_function_path")
    if function is not None and settings.keys() & {"eval_prompt_data", "eval_config"}:
        # The rollout function also evaluates, unless the run names another function for that.
        kept.setdefault("eval_function_path", run.absolute("rollout_function_path", function))
    return kept


def plugin_attributes(run: RecordedRun) -> dict[str, Any]:
    """Returns the keys of the run's --custom-config-path that are not settings but attributes of plug-ins' `args`."""
    from slime.launcher.config.run_config import read_custom

    path = run.settings.get("custom_config_path")
    return {} if path is None else read_custom(str(run.started_in / path))[1]


def _run(words: list[str], config: RunConfig, output: Path, inherited: Collection[str], *, as_json: bool) -> int:
    """Runs the evaluation, writes its rows and scores, and prints the scores."""
    from slime.launcher.cli.train import run_train

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        code = run_train(words, inherited=inherited)
    if code:
        return code
    rows = collect(output, config)
    scores = {name: score([row for row in rows if row["dataset"] == name]) for name in {r["dataset"]: 0 for r in rows}}
    found = {name: {key: _plain(value) for key, value in result._asdict().items()} for name, result in scores.items()}
    write_whole(output / SCORES, json.dumps(found, indent=2) + "\n")
    if as_json:
        print(json.dumps(found))
    else:
        _print(scores)
        print(f"rows   {output / ROWS}")
    return 0


def collect(output: Path, config: Any) -> list[dict[str, Any]]:
    """Turns the recording of the evaluation into rows, and writes them."""
    from slime.rollout.recordings.paths import path_of
    from slime.rollout.recordings.rollouts import read_rollout

    recorded = path_of(str(output / RECORDED), 0, evaluation=True)
    rollout = config.rollout
    rows = []
    for group in read_rollout(recorded).groups:
        key = rollout.eval_overrides.get(group.dataset, {}).get("reward_key")
        key = key or rollout.eval_reward_key or rollout.reward_key
        for sample in group.samples:
            reward: Any = sample.reward
            # An agent leaves a failed sample without a reward; it counts as unsolved.
            value = 0.0 if reward is None else reward[key] if isinstance(reward, Mapping) else reward
            rows.append(
                {
                    "dataset": group.dataset, "group_index": group.group_index, "index": sample.index,
                    "rollout_id": sample.rollout_id,
                    "prompt": sample.prompt, "response": sample.response, "label": sample.label,
                    "score": float(value), "reward": reward,
                    "status": sample.status.value, "response_length": sample.response_length,
                    "metadata": sample.metadata,
                }
            )  # fmt: skip
    with whole_file(output / ROWS) as file:
        file.writelines(json.dumps(row, default=str) + "\n" for row in rows)
    recorded.unlink()
    return rows


def score(rows: Sequence[Mapping[str, Any]]) -> Score:
    """Returns the mean over samples, and its error from the spread between prompts: samples of a prompt correlate."""
    # Segments of one trajectory share its reward, and count once, as in training.
    prompts: dict[int, dict[Any, float]] = {}
    for position, row in enumerate(rows):
        rollout = row.get("rollout_id")
        key = ("sample", position) if rollout is None else ("rollout", rollout)
        prompts.setdefault(row["group_index"], {}).setdefault(key, row["score"])
    groups = {index: list(samples.values()) for index, samples in prompts.items()}
    total, count = sum(map(sum, groups.values())), sum(map(len, groups.values()))
    mean = total / count
    # The error of a ratio of sums, which gives prompts with fewer samples less weight.
    spread = sum((sum(group) - mean * len(group)) ** 2 for group in groups.values())
    size = len(groups)
    error = math.sqrt(spread * size / (size - 1)) / count if size > 1 else math.nan
    return Score(mean, error, size, count)


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _print(scores: Mapping[str, Score]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("set", "score", "error", "prompts", "samples", box=None, pad_edge=False)
    for name, found in scores.items():
        error = f"± {found.error:.4f}" if math.isfinite(found.error) else "-"
        table.add_row(name, f"{found.mean:.4f}", error, str(found.prompts), str(found.samples))
    Console(highlight=False, markup=False).print(table)
