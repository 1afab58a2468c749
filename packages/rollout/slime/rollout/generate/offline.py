"""Answers and scores the prompts of a file, without a buffer."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from slime.rollout.calls.call import CALL, RolloutCall
from slime.rollout.calls.outputs import flatten
from slime.rollout.generate.default import RolloutIteration
from slime.rollout.generate.openai_server import FLAG, LOST, OpenAIAddress, OpenAIServer, check_settings
from slime.rollout.generate.output_file import KeptGroups, ProgressLine, check_output
from slime.rollout.generate.sample import TOO_LONG
from slime.rollout.launch import close_state, open_state
from slime.rollout.metrics import rollout_metrics, time_metrics
from slime.rollout.plugins import CustomGenerate
from slime.rollout.prompts.tokenizer import has_chat_template
from slime.rollout.settings.rollout import RolloutSettings
from slime.rollout.sources import MemorySource
from slime.types import Sample
from slime.types.errors import InvalidFile, InvalidSetting, MissingFile, counted, errors_name
from slime.types.files import check_readable, hub_hint
from slime.types.plugins import load_setting
from slime.types.prompt_files.readers import READERS, read_jsonl, reader_of
from slime.types.prompt_files.slices import split_slice
from slime.types.settings import spelled
from slime.types.wire.json_fields import is_utf8

PROMPTS = "--prompts"
PACKAGE = "slime-rollout"
# Settings that make other answers. Those of engines and of time limits may change between two runs of one output.
IDENTIFYING = (
    "hf_checkpoint", "n_samples_per_prompt", "apply_chat_template", "apply_chat_template_kwargs", "rm_type", "rm_url",
    "custom_rm_path", "reward_key", "custom_generate_function_path", "rollout_temperature", "rollout_top_p",
    "rollout_top_k", "rollout_max_response_len", "rollout_max_prompt_len", "rollout_max_context_len", "rollout_stop",
    "rollout_stop_token_ids", "rollout_skip_special_tokens", "deterministic", "rollout_seed",
)  # fmt: skip
_ALL = "it answers each prompt once, and drops no group"
_OWN = "it answers the prompts of --prompts"
_EVALUATION = "it evaluates nothing, and samples as training does"
# Settings of a service's iterations and evaluations -> the reason why this command does not read them.
UNREAD = {
    **dict.fromkeys((
        "rollout_batch_size", "over_sampling_batch_size", "partial_rollout", "dynamic_sampling_filter_path",
    ), _ALL),
    **dict.fromkeys(("load_forge_rollout_data", "rollout_function_path", "data_source_path"), _OWN),
    **dict.fromkeys((
        "eval_function_path", "eval_reward_key", "eval_temperature", "eval_top_p", "eval_top_k",
        "eval_max_response_len", "eval_max_prompt_len", "eval_max_context_len", "eval_min_new_tokens",
        "n_samples_per_eval_prompt", "custom_eval_rollout_log_function_path",
    ), _EVALUATION),
    "custom_rollout_log_function_path": "it prints the metrics",
    "save_debug_rollout_data": "--output holds the samples",
}  # fmt: skip


class _PromptsOfFile(MemorySource):
    """Prompts of a file, whose groups are kept as they complete."""

    def __init__(self, rows: list[dict[str, Any]], n_samples: int, kept: KeptGroups) -> None:
        super().__init__(rows, n_samples)
        self._kept = kept
        self.progress: ProgressLine | None = None

    def complete(self, samples: list[Sample], leased: list[Sample] | None = None) -> None:
        super().complete(samples, leased)
        index = (leased or samples)[0].group_index
        assert index is not None
        self._kept.add(index, samples)
        if self.progress is not None:
            self.progress(len(self._kept.groups))

    def reject(self, group: list[Sample], reason: str) -> None:
        super().reject(group, reason)
        if self.progress is not None:
            self.progress.total -= 1


class _EveryPrompt(RolloutIteration):
    """Answers all prompts of the source but those that cannot be used, in whose place there are no others."""

    async def _fits(self, group: list[Sample]) -> bool:
        fits = await super()._fits(group)
        self.target -= not fits
        return fits


def generate_file(
    settings: RolloutSettings,
    prompts: str,
    output: Path,
    *,
    input_key: str = "input",
    label_key: str = "label",
    metadata_key: str = "metadata",
    overwrite: bool = False,
    server: OpenAIAddress | None = None,
) -> dict[str, float]:
    """Writes one sample per line or row, in the order of the prompts; returns the metrics of all of them.

    Groups are kept in `output`.part as they complete, and a command that was ended goes on from there.
    server: answers in place of engines.
    Prompts without tokens, or longer than `--rollout-max-prompt-len` or the context, are left out and counted. No
    sample is dropped by a filter.
    Raises what `read_prompts` raises; InvalidSetting for a setting of iterations or evaluations, and for an `output`
    that cannot be a file or, without `overwrite`, is a file that is not empty.
    """
    _check_unread(settings)
    check_output(output, overwrite)
    if server is not None:
        check_settings(settings)
    rows = read_prompts(prompts, input_key, label_key, metadata_key)
    if settings.apply_chat_template or any(isinstance(row["prompt"], list) for row in rows):
        _check_template(settings, prompts)
    kept = KeptGroups(
        output, _identity(settings, rows, server), total=len(rows), sources=_sources(settings), overwrite=overwrite
    )
    try:
        if kept.groups and kept.changed:
            answered = f"{counted(len(kept.groups), 'prompt was', 'prompts were')} answered, in {kept.path}"
            print(
                f"WARNING: {answered}, before {', '.join(kept.changed)} changed: those answers and their rewards stay; "
                "--overwrite answers all prompts again",
                file=sys.stderr,
            )
        return _generate(settings, rows, kept, server)
    except BaseException:
        if kept.groups and kept.path.exists():
            text = f"{len(kept.groups)} of {counted(len(rows), 'prompt')} answered, in {kept.path}: the same command"
            print(f"{text} goes on from there", file=sys.stderr)
        raise
    finally:
        kept.close()


def _identity(settings: RolloutSettings, rows: list[dict[str, Any]], server: OpenAIAddress | None) -> str:
    asked = {name: getattr(settings, name, None) for name in IDENTIFYING}
    if server is not None:
        asked["openai_model"] = server.model
    return hashlib.sha256(json.dumps([asked, rows], sort_keys=True, default=str).encode()).hexdigest()


def _sources(settings: RolloutSettings) -> dict[str, str]:
    """Returns a fingerprint of each file and model that a setting names: they may change under the same name.

    Raises PluginError for a function that cannot be loaded.
    """
    found = {}
    for name in ("custom_rm_path", "custom_generate_function_path"):
        module = sys.modules.get(getattr(load_setting(settings, name), "__module__", ""))
        if file := getattr(module, "__file__", None):
            found[spelled(settings, name)] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    weights = sorted(Path(settings.hf_checkpoint).glob("*.safetensors"))
    if weights:
        states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weights]
        found[spelled(settings, "hf_checkpoint")] = hashlib.sha256(repr(states).encode()).hexdigest()
    return found


def _generate(
    settings: RolloutSettings, rows: list[dict[str, Any]], kept: KeptGroups, server: OpenAIAddress | None
) -> dict[str, float]:
    state = open_state(settings, hosted=None if server is None else [])
    client = None if server is None else OpenAIServer(server, float(settings.sglang_router_request_timeout_secs))
    before = CALL.set(None)
    try:
        if client is not None:
            state.plugins.generate = CustomGenerate(client.generate, FLAG)
            # The note says so, of all samples.
            state.warned_of_text = True
            print(LOST, file=sys.stderr)
        source = _PromptsOfFile(rows, settings.n_samples_per_prompt, kept)
        fitting = []
        for group in source.get_samples(len(rows)):
            if _fits(state, group[0]):
                fitting.append(group)
            else:
                source.reject(group, TOO_LONG)
        left = [group for group in fitting if group[0].group_index not in kept.groups]
        source.add_samples(left)
        source.progress = ProgressLine(len(fitting), len(kept.groups))
        call = RolloutCall(0, len(left))
        CALL.set(call)
        started = time.monotonic()
        state.args.rollout_batch_size = state.args.over_sampling_batch_size = len(left)
        state.plugins.dynamic_filter = None
        if left:
            iteration = _EveryPrompt(state, state.args, 0, source, call)
            state.loop.run(state.fleet.guard(iteration.run()))
        seconds = time.monotonic() - started
        if not kept.groups:
            raise InvalidFile.must_be(PROMPTS, "prompts that the model can read", got=_refusals(source, len(rows)))
        groups = kept.finish()
        metrics = rollout_metrics(groups, state.args)
        metrics |= time_metrics(flatten(source.completed), seconds, call.reward_seconds)
        if source.rejected:
            print(f"no answers to {_refusals(source, len(rows))}", file=sys.stderr)
        refused = {TOO_LONG: 0} | source.rejected
        return metrics | {f"rollout/{reason}": float(count) for reason, count in refused.items()}
    finally:
        CALL.reset(before)
        if client is not None:
            state.loop.run(client.close())
        close_state(state)


def _refusals(source: _PromptsOfFile, total: int) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in source.rejected.items())
    return f"{sum(source.rejected.values())} of {counted(total, 'prompt')} ({reasons})"


def _check_unread(settings: RolloutSettings) -> None:
    """Raises InvalidSetting for a setting that would have no effect."""
    for name, reason in UNREAD.items():
        if getattr(settings, name) != getattr(RolloutSettings, name):
            raise InvalidSetting.conflict(spelled(settings, name), "slime-rollout generate", reason)


def _check_template(settings: RolloutSettings, prompts: str) -> None:
    if "chat_template" not in settings.apply_chat_template_kwargs and not has_chat_template(settings.hf_checkpoint):
        needed = (
            "--apply-chat-template" if settings.apply_chat_template else f"--prompts {prompts}, with chat messages,"
        )
        raise InvalidSetting.requires(
            needed, "a tokenizer with a chat template", f"--hf-checkpoint {settings.hf_checkpoint} has none"
        )


def _fits(state: Any, sample: Sample) -> bool:
    limit = state.args.rollout_max_prompt_len
    return limit is None or len(state.prompts.encode(sample)) <= limit


def read_prompts(source: str, input_key: str, label_key: str, metadata_key: str) -> list[dict[str, Any]]:
    """Reads fields of Sample, one dict per row of `PATH` or `PATH@[a:b]`, as `--prompt-data` of a training does.

    PATH: a file whose ending tells its kind, with JSON lines for an ending that tells none, or `reasoning_gym:NAME`.
    Raises MissingFile; InvalidFile naming a broken row; InvalidSetting; NotAvailable for a missing package.
    """
    path, chosen = split_slice(source, PROMPTS, PACKAGE)
    if not Path(path).exists() and (hint := hub_hint(path, PROMPTS, "dataset")):
        raise MissingFile(f"{PROMPTS}: no such file {path}{hint}", field=PROMPTS, value=path, expected="a file")
    check_readable(path, PROMPTS)
    read = reader_of(path, PROMPTS, PACKAGE) if _tells_its_kind(path) else read_jsonl
    rows = []
    with errors_name(PROMPTS):
        for where, row in list(read(path))[chosen]:
            rows.append(_fields(row, f"{path}, {where}", input_key, label_key, metadata_key))
    if not rows:
        raise InvalidFile(f"{PROMPTS} {source} has no rows", field=PROMPTS, value=source, expected="a row")
    return rows


def _tells_its_kind(path: str) -> bool:
    return path.lower().endswith((*READERS, ".gz"))


def _fields(row: dict[str, Any], where: str, input_key: str, label_key: str, metadata_key: str) -> dict[str, Any]:
    if not isinstance(row.get(input_key), (str, list)):
        raise InvalidFile.must_be(
            where, f"an object with text or a list of chat messages at the key {input_key!r} (--input-key)", got=row
        )
    prompt = row[input_key]
    if isinstance(prompt, list) and not (prompt and all(isinstance(each, dict) and "role" in each for each in prompt)):
        raise InvalidFile.must_be(f"{where}: {input_key!r}", "chat messages: objects with a role", got=prompt)
    for key in (input_key, label_key):
        if not is_utf8(row.get(key)):
            raise InvalidFile.must_be(
                f"{where}: {key!r}", "text that UTF-8 can hold, without halves of surrogate pairs", got=row[key]
            )
    metadata = row.get(metadata_key) or {}
    if not isinstance(metadata, dict):
        raise InvalidFile.must_be(f"{where}: {metadata_key!r}", "an object (--metadata-key)", got=metadata)
    return {"prompt": prompt, "label": row.get(label_key), "metadata": metadata}
