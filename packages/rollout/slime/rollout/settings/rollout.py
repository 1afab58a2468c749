"""Settings of slime-rollout: generation, rewards, evaluation and engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.rollout.engines.registry import KINDS, counted_by_engines, unread_settings
from slime.rollout.settings.eval_overrides import check_overrides
from slime.rollout.settings.metrics import MetricSettings
from slime.rollout.settings.model_file import MOST_ENGINES
from slime.rollout.settings.served_models import ModelSettings
from slime.types.addresses import split_url
from slime.types.errors import InvalidSetting
from slime.types.setting_values import flag_name
from slime.types.settings import json_object, setting
from slime.types.shared_settings import (
    BatchSettings,
    EngineSettings,
    GroupSettings,
    ModeSettings,
    PolicySettings,
    PromptSettings,
)

DEFAULT_ROLLOUT_FUNCTION = "slime.rollout.sglang_rollout.generate_rollout"
LOSS_MASK_TYPES = ("qwen", "qwen3", "qwen3_5", "distill_qwen")
REPLAY_FUNCTION = "slime.rollout.forge_load.generate_rollout"
DEFAULT_DATA_SOURCE = "slime.rollout.data_source.RolloutDataSourceWithBuffer"


@dataclass(kw_only=True)
class RolloutSettings(
    PolicySettings, BatchSettings, GroupSettings, PromptSettings, EngineSettings, ModeSettings, ModelSettings,
    MetricSettings,
):  # fmt: skip
    """Rollout."""

    # The rollout loop.
    loss_mask_type: str = setting(
        "qwen",
        "Rendering of conversations for --rollout-function-path slime.rollout.sft_rollout.generate_rollout: each turn "
        "alone (qwen), behind a user turn (qwen3), all at once with the reasoning that Qwen3.5's template keeps "
        "(qwen3_5), or the last turn only (distill_qwen)",
        choices=LOSS_MASK_TYPES,
    )
    rollout_function_path: str = setting(
        DEFAULT_ROLLOUT_FUNCTION, "Rollout function, as module.attribute or file.py:function"
    )
    over_sampling_batch_size: int | None = setting(
        None, "Groups leased at a time (default: --rollout-batch-size)", minimum=1
    )
    dynamic_sampling_filter_path: str | None = setting(None, "Function that keeps or drops a finished group")
    partial_rollout: bool = setting(
        False, "Return unfinished groups with their partial responses, to continue them in a later iteration"
    )
    mask_offpolicy_in_partial_rollout: bool = setting(
        False, "Set the loss mask of tokens generated before the continuation to 0"
    )
    custom_generate_function_path: str | None = setting(
        None, "Function that generates one sample (or the samples of a group) in place of the default"
    )
    custom_agent_path: str | None = setting(
        None,
        "Agent that plays the episode of a sample: a function that talks to the model over OpenAI's or Anthropic's "
        "protocol and returns a reward",
    )
    rollout_sample_hook_path: list[str] = setting(
        list, "Function called on each generated sample before its reward; may be repeated", append=True
    )
    rollout_sample_filter_path: str | None = setting(
        None, "Function that sees the chosen groups and sets remove_sample"
    )
    rollout_all_samples_process_path: str | None = setting(None, "Function that sees all groups, dropped ones included")
    custom_rollout_log_function_path: str | None = setting(
        None, "Function that logs an iteration; returning true skips the default metrics"
    )
    custom_eval_rollout_log_function_path: str | None = setting(
        None, "Function that logs an evaluation; returning true skips the default metrics"
    )
    max_turns: int | None = setting(
        None, "Maximum number of turns of a conversation: `args.max_turns` of your generate function", minimum=1
    )
    data_source_path: str = setting(
        DEFAULT_DATA_SOURCE, "Class that provides the prompts in place of the buffer's own: CLASS(args)", metavar="PATH"
    )
    load_forge_rollout_data: str | None = setting(
        None, "Dump of samples to take in place of generated ones; {rollout_id} in the path is replaced", metavar="PATH"
    )
    save_debug_rollout_data: str | None = setting(
        None,
        "File to record samples in; {rollout_id} in the path becomes the iteration, or eval_N for an evaluation. A "
        "path without it keeps the last of each (python -m slime.rollout.recordings FILE prints it)",
        metavar="PATH",
    )
    rollout_prompt_wait_seconds: float = setting(
        600.0, "Seconds that an iteration waits for prompts when the buffer has none", above=0
    )
    rollout_lease_seconds: float = setting(600.0, "Seconds that a lease lasts without renewal", minimum=1)

    # Sampling.
    rollout_max_response_len: int = setting(1024, "Maximum new tokens per sample", minimum=1)
    overlong_mask: bool = setting(False, "Leave truncated responses out of the loss (DAPO's overlong filtering)")
    overlong_buffer_len: int | None = setting(
        None,
        "Tokens before --rollout-max-response-len over which the reward falls by --overlong-penalty (DAPO)",
        minimum=1,
    )
    overlong_penalty: float = setting(1.0, "Largest penalty of --overlong-buffer-len", above=0)
    rollout_max_prompt_len: int | None = setting(
        None, "Longest prompt in tokens; longer ones are rejected (default: --rollout-max-context-len - 1)", minimum=1
    )
    rollout_max_context_len: int | None = setting(
        None, "Maximum tokens of prompt and response together (default: the model's)", minimum=2
    )
    rollout_stop: list[str] | None = setting(None, "Strings that end a response")
    rollout_stop_token_ids: list[int] | None = setting(None, "Token ids that end a response", minimum=0)
    rollout_skip_special_tokens: bool = setting(False, "Leave special tokens out of the text of a response")

    # Prompts to tokens.
    apply_chat_template: bool = setting(
        False, "Render text prompts as one user message; lists of messages are always rendered"
    )
    apply_chat_template_kwargs: dict[str, Any] = setting(
        dict, "Arguments of the chat template, a JSON object", parse=json_object
    )

    # Rewards.
    rm_type: str | None = setting(
        None,
        "Built-in reward function (math, integer, remote_rm, ...); metadata.rm_type of a sample overrides it",
    )
    group_rm: bool = setting(
        False,
        "Score the samples of a group in one call; evaluation does so only if the --custom-rm-path file has "
        "no function for one sample",
    )
    rm_url: str | None = setting(
        None,
        "URL that --rm-type remote_rm posts to, or model://NAME/PATH for a model of --sglang-config",
    )
    custom_rm_path: str | None = setting(None, "Your reward function, as module.attribute or file.py:function")

    # Evaluation; None falls back to the value of training.
    eval_function_path: str | None = setting(None, "Evaluation function (default: --rollout-function-path)")
    eval_reward_key: str | None = setting(
        None, "Key of the reward in evaluation where rewards are dicts (default: --reward-key)"
    )
    eval_temperature: float | None = setting(
        None, "Sampling temperature of evaluation; 0 is greedy (default: --rollout-temperature)", minimum=0
    )
    eval_top_p: float | None = setting(
        None, "Top-p (nucleus) sampling of evaluation (default: --rollout-top-p)", above=0, maximum=1
    )
    eval_top_k: int | None = setting(
        None, "Top-k sampling of evaluation; -1 turns it off (default: --rollout-top-k)", minimum=-1
    )
    eval_max_response_len: int | None = setting(
        None, "Maximum new tokens per sample in evaluation (default: --rollout-max-response-len)", minimum=1
    )
    eval_max_prompt_len: int | None = setting(
        None, "Longest evaluation prompt in tokens; longer ones are left out", minimum=1
    )
    eval_max_context_len: int | None = setting(
        None,
        "Maximum tokens of prompt and response together in evaluation (default: --rollout-max-context-len)",
        minimum=2,
    )
    eval_min_new_tokens: int | None = setting(
        None, "Minimum new tokens per sample in evaluation: the response cannot end before", minimum=0
    )
    eval_overrides: dict[str, Any] = setting(
        dict, "Settings of single evaluation sets by name: {NAME: {temperature: 0}}", flag=False
    )

    # Engines.
    rollout_engine_api_key_file: str | None = setting(
        None, "File with the API key of the engines at --rollout-external-engine-addrs", metavar="FILE"
    )
    rollout_engine: str = setting(
        "auto",
        "Engine to start: sglang, embedded (transformers, also on a CPU), or auto: sglang where there is a GPU for it",
        choices=("auto", *KINDS),
    )
    rollout_engine_host: str = setting(
        "127.0.0.1",
        "Address that the engines listen on; on a cluster of several nodes, that of their node unless given",
    )
    rollout_num_gpus_per_engine: int = setting(1, "GPUs per SGLang engine", minimum=1, aliases=("sglang-tp-size",))
    sglang_args: dict[str, Any] = setting(dict, "Flags of SGLang's server by name", flag=False)
    offload_rollout: bool | None = setting(
        None,
        "Free the engines' GPU memory while the trainer works (default: with --colocate, unless the trainer finds room "
        "for all its work beside them)",
    )
    rollout_num_engines: int = setting(1, "Number of embedded engines to start", minimum=1, maximum=MOST_ENGINES)
    rollout_engine_dtype: str = setting(
        "auto",
        "Data type of an embedded engine's weights; auto: as in config.json",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    rollout_engine_device: str = setting(
        "auto", "Device of an embedded engine; auto: cuda if there is one", choices=("auto", "cpu", "cuda")
    )
    rollout_engine_threads: int | None = setting(
        None,
        "CPU threads of an embedded engine (default: OMP_NUM_THREADS, else a share of all cores; 1 for models narrower "
        "than 256)",
        minimum=1,
    )
    rollout_engine_max_running_requests: int | None = setting(
        None, "Maximum number of sequences that an embedded engine decodes together (default: 256)", minimum=1
    )
    rollout_engine_max_total_tokens: int | None = setting(
        None,
        "Maximum tokens, of all running sequences together, whose keys and values an engine holds; more sequences wait "
        "(default: as many as half of the memory holds, which embedded engines that share it divide; SGLang's own "
        "choice)",
        minimum=1,
    )
    rollout_engine_start_seconds: float = setting(1800.0, "Seconds that the engines may take to start", above=0)
    sglang_server_concurrency: int = setting(512, "Maximum number of samples in flight per engine", minimum=1)
    rollout_tune_concurrency: bool = setting(
        False,
        "Let the number of samples in flight at each engine follow the engine's load, up to "
        "--sglang-server-concurrency: more while nothing queues there, fewer when its cache is full",
    )
    sglang_router_request_timeout_secs: int = setting(14400, "Seconds that one generation request may take", minimum=1)
    rollout_stream_interval: int | None = setting(
        None,
        "Tokens after which an engine hands over what it has of each answer; if it is lost, its requests go on "
        "elsewhere from there. 0: only whole answers, so that requests begin again (default: 64 with the embedded "
        "engine; 0 with SGLang, whose rollouts take 7 % longer with 64, and with --deterministic)",
        minimum=0,
    )
    rollout_health_check_interval: float = setting(30.0, "Seconds between health probes of an engine", above=0)
    rollout_health_check_timeout: float = setting(30.0, "Seconds until a health probe counts as failed", above=0)
    rollout_health_check_first_wait: float = setting(0.0, "Seconds before the first health probe", minimum=0)
    use_fault_tolerance: bool | None = setting(
        None,
        "Restart an engine that dies or misses two health probes, and continue what it had in flight; in `slime train` "
        "on one node restart the buffer, the rollout service and the trainer's ranks, too. Without it the loss of one "
        "ends the run (default: on where one node has all engines of the run, and they share no GPUs with "
        "the trainer)",
    )
    rollout_engine_max_restarts: int = setting(
        5,
        "Maximum number of restarts of one engine within --rollout-engine-restart-window; one more ends the run",
        minimum=1,
    )
    rollout_engine_restart_window: float = setting(
        600.0, "Seconds over which the restarts of an engine are counted", above=0
    )
    rollout_weight_update_wait_seconds: float = setting(
        600.0, "Seconds that a weight update waits for running requests", above=0
    )

    def __post_init__(self) -> None:
        if self.over_sampling_batch_size is not None and self.over_sampling_batch_size < self.rollout_batch_size:
            raise InvalidSetting.must_be(
                "--over-sampling-batch-size",
                f"at least --rollout-batch-size {self.rollout_batch_size}",
                got=self.over_sampling_batch_size,
            )
        if self.mask_offpolicy_in_partial_rollout and not self.partial_rollout:
            raise InvalidSetting.requires("--mask-offpolicy-in-partial-rollout", "--partial-rollout")
        if self.rollout_top_k == 0 or self.eval_top_k == 0:
            flag = "--rollout-top-k" if self.rollout_top_k == 0 else "--eval-top-k"
            raise InvalidSetting.must_be(flag, "-1 (off) or greater than 0", got=0)
        if "" in (self.rollout_stop or ()):
            raise InvalidSetting.must_be("--rollout-stop", "strings that are not empty", got="")
        if self.rm_type == "remote_rm" and not self.rm_url:
            raise InvalidSetting.requires("--rm-type remote_rm", "--rm-url URL")
        if self.max_prompt_len is not None and self.rollout_max_context_len is not None:
            if self.max_prompt_len >= self.rollout_max_context_len:
                raise InvalidSetting.must_be(
                    "--rollout-max-prompt-len",
                    f"less than --rollout-max-context-len {self.rollout_max_context_len}",
                    got=self.max_prompt_len,
                )

        self.eval_overrides = check_overrides(self.eval_overrides)
        if self.save_debug_rollout_data is not None:
            from slime.rollout.recordings.paths import check_template

            check_template("--save-debug-rollout-data", self.save_debug_rollout_data)
        self._check_functions()
        self._check_engines()

    def _check_functions(self) -> None:
        if self.load_forge_rollout_data is not None:
            if self.rollout_function_path not in (DEFAULT_ROLLOUT_FUNCTION, REPLAY_FUNCTION):
                raise InvalidSetting.conflict(
                    "--load-forge-rollout-data",
                    f"--rollout-function-path {self.rollout_function_path}",
                    "the samples come from the dump",
                )
            self.rollout_function_path = REPLAY_FUNCTION
        elif self.rollout_function_path == REPLAY_FUNCTION:
            raise InvalidSetting.requires(f"--rollout-function-path {REPLAY_FUNCTION}", "--load-forge-rollout-data")
        if self.overlong_buffer_len is not None and self.overlong_buffer_len > self.rollout_max_response_len:
            raise InvalidSetting.must_be(
                "--overlong-buffer-len",
                f"at most --rollout-max-response-len {self.rollout_max_response_len}",
                got=self.overlong_buffer_len,
            )
        if self.overlong_penalty != type(self).overlong_penalty and self.overlong_buffer_len is None:
            raise InvalidSetting.requires(f"--overlong-penalty {self.overlong_penalty:g}", "--overlong-buffer-len")
        if self.custom_agent_path is not None and self.custom_generate_function_path is not None:
            raise InvalidSetting.conflict(
                f"--custom-agent-path {self.custom_agent_path}",
                f"--custom-generate-function-path {self.custom_generate_function_path}",
                "each of them generates the samples",
            )
        own_function = self.custom_generate_function_path or self.custom_agent_path
        replaces_default = own_function or self.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION
        if self.max_turns is not None and not replaces_default:
            raise InvalidSetting.requires(
                f"--max-turns {self.max_turns}",
                "--custom-generate-function-path, --custom-agent-path or --rollout-function-path",
                "the default generates one turn",
            )

    def _check_engines(self) -> None:
        self.check_models()
        for address in self.rollout_external_engine_addrs or ():
            split_url(address, "--rollout-external-engine-addrs")
        if self.rollout_stream_interval and self.deterministic:
            raise InvalidSetting.conflict(
                f"--rollout-stream-interval {self.rollout_stream_interval}",
                "--deterministic",
                "log-probs after kept tokens differ in their last bits from those of a run without a loss",
            )
        if self.rollout_engine_api_key_file is not None and not self.rollout_external_engine_addrs:
            raise InvalidSetting.requires(
                "--rollout-engine-api-key-file",
                "--rollout-external-engine-addrs",
                "engines that a run starts get keys of their own",
            )
        if self.rollout_num_gpus == 0 and not self.rollout_external_engine_addrs:
            raise InvalidSetting.requires(
                "--rollout-num-gpus 0",
                "--rollout-external-engine-addrs",
                "without GPUs of its own the run needs engines elsewhere",
            )
        if self.sglang_args:
            # Reading the flags of SGLang takes time that most runs need not spend.
            from slime.rollout.engines.sglang.flags import check

            self.sglang_args = check(self.sglang_args)
            if self.rollout_external_engine_addrs:
                raise InvalidSetting.conflict(
                    flag_name(f"sglang_{next(iter(self.sglang_args))}"),
                    "--rollout-external-engine-addrs",
                    "external engines were started with flags of their own",
                )
            own_limit, sglang_limit = self.rollout_engine_max_total_tokens, self.sglang_args.get("max_total_tokens")
            if own_limit is not None and sglang_limit is not None:
                raise InvalidSetting.conflict(
                    f"--rollout-engine-max-total-tokens {own_limit}",
                    f"--sglang-max-total-tokens {sglang_limit}",
                    "both set the same limit",
                )
        if self.rollout_engine != "auto":
            kind = KINDS[self.rollout_engine]
            if refused := kind.refused_server_flags(self.sglang_args):
                raise InvalidSetting.conflict(
                    f"--rollout-engine {self.rollout_engine}", refused[0], "that flag is SGLang's"
                )
            for typed, reason in unread_settings(kind, self):
                raise InvalidSetting.conflict(f"--rollout-engine {self.rollout_engine}", typed, reason)
            kind.check(self)
        if self.rollout_external_engine_addrs and self.colocate:
            raise InvalidSetting.conflict(
                "--colocate", "--rollout-external-engine-addrs", "external engines have no GPU to share"
            )
        if self.use_fault_tolerance and self.rollout_external_engine_addrs:
            raise InvalidSetting.conflict(
                "--use-fault-tolerance",
                "--rollout-external-engine-addrs",
                "only engines that the run has started can be started again",
            )
        if self.rollout_external_engine_addrs and counted_by_engines(self.rollout_engine):
            raise InvalidSetting.conflict(
                f"--rollout-engine {self.rollout_engine}",
                "--rollout-external-engine-addrs",
                "external engines are not started by the run",
            )

    @property
    def offloads(self) -> bool:
        """True where the engines' GPU memory is released while the trainer works."""
        return self.colocate if self.offload_rollout is None else self.offload_rollout

    @property
    def max_prompt_len(self) -> int | None:
        """Prompts longer than this are rejected; None: a prompt that does not fit is an error."""
        if self.rollout_max_prompt_len is not None:
            return self.rollout_max_prompt_len
        return None if self.rollout_max_context_len is None else self.rollout_max_context_len - 1
