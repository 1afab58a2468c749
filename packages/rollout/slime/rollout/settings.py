"""Settings of slime-rollout: what is generated, how it is scored, and where the engines are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.rollout.eval_overrides import check_overrides
from slime.types.errors import InvalidSetting
from slime.types.settings import REQUIRED, json_object, setting

DEFAULT_ROLLOUT_FUNCTION = "slime.rollout.sglang_rollout.generate_rollout"
REPLAY_FUNCTION = "slime.rollout.forge_load.generate_rollout"
DEFAULT_DATA_SOURCE = "slime.rollout.data_source.RolloutDataSourceWithBuffer"


@dataclass(kw_only=True)
class RolloutSettings:
    """Rollout."""

    hf_checkpoint: str = setting(
        REQUIRED, "HF directory: tokenizer, config, initial weights of the engines", metavar="DIR"
    )

    # The rollout loop.
    rollout_function_path: str = setting(
        DEFAULT_ROLLOUT_FUNCTION, "the rollout function: module.attribute or file.py:function"
    )
    rollout_batch_size: int = setting(32, "prompt groups a rollout", minimum=1)
    n_samples_per_prompt: int = setting(1, "responses a prompt", minimum=1)
    over_sampling_batch_size: int | None = setting(
        None, "prompt groups fetched at a time; default rollout_batch_size", minimum=1
    )
    dynamic_sampling_filter_path: str | None = setting(None, "keeps or drops a finished group")
    partial_rollout: bool = setting(False, "return unfinished groups with what they have, to go on from there later")
    mask_offpolicy_in_partial_rollout: bool = setting(False, "zero the loss mask of tokens made before the resume")
    custom_generate_function_path: str | None = setting(
        None, "replaces the generation of one sample (or of a group's samples)"
    )
    rollout_sample_hook_path: list[str] = setting(
        list, "hook on a generated sample before its reward; repeatable", append=True
    )
    rollout_sample_filter_path: str | None = setting(None, "sees the chosen groups, sets remove_sample")
    rollout_all_samples_process_path: str | None = setting(None, "sees all groups, dropped ones included")
    custom_rollout_log_function_path: str | None = setting(
        None, "logs a rollout; a true answer skips the default metrics"
    )
    custom_eval_rollout_log_function_path: str | None = setting(
        None, "logs an evaluation; a true answer skips the default metrics"
    )
    max_turns: int | None = setting(
        None, "turns of a conversation at most: `args.max_turns` of the function that leads it", minimum=1
    )
    data_source_path: str = setting(
        DEFAULT_DATA_SOURCE, "class that gives the prompts, in place of the buffer's own: CLASS(args)", metavar="PATH"
    )
    load_forge_rollout_data: str | None = setting(
        None, "samples to take in place of generated ones: a dump, {rollout_id} in it is replaced", metavar="PATH"
    )
    save_debug_rollout_data: str | None = setting(
        None,
        "file of the samples of each rollout and evaluation; {rollout_id} in the path is replaced, of an evaluation by "
        "eval_N (python -m slime.rollout.recordings FILE prints it)",
        metavar="PATH",
    )
    rollout_prompt_wait_seconds: float = setting(
        600.0, "how long a rollout waits for prompts when the buffer has none", above=0
    )
    rollout_lease_seconds: float = setting(600.0, "how long a lease lasts without renewal", minimum=1)

    # Sampling.
    rollout_temperature: float = setting(1.0, "sampling temperature; the trainer divides logits by it", above=0)
    rollout_top_p: float = setting(
        1.0,
        "Nucleus of tokens to sample from; training refuses other than 1, as its log-probs are over the whole "
        "vocabulary",
        above=0,
        maximum=1,
    )
    rollout_top_k: int = setting(-1, "top-k; -1 is off", minimum=-1)
    rollout_max_response_len: int = setting(1024, "new tokens a sample at most", minimum=1)
    rollout_max_prompt_len: int | None = setting(
        None, "reject longer prompts (tokens); default rollout_max_context_len - 1", minimum=1
    )
    rollout_max_context_len: int | None = setting(
        None, "prompt and response tokens at most; default: the model's", minimum=2
    )
    rollout_stop: list[str] | None = setting(None, "stop strings")
    rollout_stop_token_ids: list[int] | None = setting(None, "stop token ids", minimum=0)
    rollout_skip_special_tokens: bool = setting(False, "leave special tokens out of the text of a response")
    rollout_seed: int = setting(42, "seed of shuffling and of sampling")
    deterministic: bool = setting(False, "fixed batches in index order and keyed sampling: same seed, same result")

    # Prompts to tokens.
    apply_chat_template: bool = setting(
        False, "render text prompts as one user message; message lists always are rendered"
    )
    apply_chat_template_kwargs: dict[str, Any] = setting(dict, "JSON arguments of the template", parse=json_object)

    # Rewards.
    rm_type: str | None = setting(None, "built-in reward; metadata.rm_type of a sample wins")
    reward_key: str | None = setting(None, "key of a dict reward that is trained on")
    group_rm: bool = setting(
        False,
        "Score the samples of a group in one call; in evaluation only where the --custom-rm-path file has no "
        "function for one sample",
    )
    rm_url: str | None = setting(None, "URL of remote_rm")
    custom_rm_path: str | None = setting(None, "custom reward function")

    # Evaluation; None falls back to the rollout's value.
    eval_function_path: str | None = setting(None, "evaluation function; default rollout_function_path")
    eval_reward_key: str | None = setting(None, "key of a dict reward in evaluation; default reward_key")
    n_samples_per_eval_prompt: int = setting(1, "responses an evaluation prompt", minimum=1)
    eval_temperature: float | None = setting(None, "0 is greedy", minimum=0)
    eval_top_p: float | None = setting(
        None, "Nucleus of tokens to sample from in evaluation (default: --rollout-top-p)", above=0, maximum=1
    )
    eval_top_k: int | None = setting(None, "top-k; -1 is off", minimum=-1)
    eval_max_response_len: int | None = setting(None, "new tokens a sample at most", minimum=1)
    eval_max_prompt_len: int | None = setting(None, "leave longer evaluation prompts out (tokens)", minimum=1)
    eval_max_context_len: int | None = setting(None, "prompt and response tokens at most", minimum=2)
    eval_min_new_tokens: int | None = setting(None, "no end of sequence before this many tokens", minimum=0)
    eval_overrides: dict[str, Any] = setting(
        dict, "what single evaluation sets do otherwise, by their names: {NAME: {temperature: 0}}", flag=False
    )
    log_passrate: bool = setting(False, "log pass@k for k = 1, 2, 4, ... in rollout and evaluation")

    # Engines.
    rollout_external_engine_addrs: list[str] | None = setting(
        None, "host:port of engines that run already", metavar="HOST:PORT"
    )
    rollout_engine_api_key_file: str | None = setting(
        None, "file with the API key of the engines at --rollout-external-engine-addrs", metavar="FILE"
    )
    rollout_engine: str = setting(
        "auto",
        "what generates: sglang, or embedded (transformers, also on a CPU); auto: sglang where there is a GPU for it",
        choices=("auto", "sglang", "embedded"),
    )
    rollout_engine_host: str = setting(
        "127.0.0.1", "address that the engines listen on (default: on a cluster of several nodes, that of their node)"
    )
    rollout_num_gpus: int | None = setting(
        None, "GPUs for generation (default: all that are visible); 0: the engines are somewhere else", minimum=0
    )
    rollout_num_gpus_per_engine: int = setting(
        1, "GPUs that one SGLang engine is spread over", minimum=1, aliases=("sglang-tp-size",)
    )
    sglang_args: dict[str, Any] = setting(dict, "flags of SGLang's server by name", flag=False)
    colocate: bool = setting(False, "trainer and engines share GPUs; changes nothing where there is no GPU")
    offload_rollout: bool | None = setting(
        None, "engines give their GPU memory back while the trainer works (default: with --colocate)"
    )
    rollout_num_engines: int = setting(1, "embedded engines to start where no external address is given", minimum=1)
    rollout_engine_dtype: str = setting(
        "auto",
        "weights of an embedded engine; auto: as in config.json",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    rollout_engine_device: str = setting(
        "auto", "where an embedded engine runs; auto: cuda if there is one", choices=("auto", "cpu", "cuda")
    )
    rollout_engine_threads: int | None = setting(
        None, "CPU threads of an embedded engine; default: all cores", minimum=1
    )
    rollout_engine_max_running_requests: int = setting(
        256, "sequences that an embedded engine decodes together", minimum=1
    )
    rollout_engine_start_seconds: float = setting(300.0, "how long the engines may take to start", above=0)
    sglang_server_concurrency: int = setting(512, "samples in flight an engine", minimum=1)
    sglang_router_request_timeout_secs: int = setting(14400, "how long one generation request may take", minimum=1)
    rollout_health_check_interval: float = setting(30.0, "seconds between health probes of an engine", above=0)
    rollout_health_check_timeout: float = setting(30.0, "seconds before a probe counts as failed", above=0)
    rollout_health_check_first_wait: float = setting(0.0, "seconds before the first probe", minimum=0)
    rollout_weight_update_wait_seconds: float = setting(
        600.0, "how long a weight update waits for running requests", above=0
    )

    def __post_init__(self) -> None:
        if self.over_sampling_batch_size is not None and self.over_sampling_batch_size < self.rollout_batch_size:
            raise _contradiction(
                "--over-sampling-batch-size",
                self.over_sampling_batch_size,
                f"at least --rollout-batch-size {self.rollout_batch_size}",
            )
        if self.mask_offpolicy_in_partial_rollout and not self.partial_rollout:
            raise _contradiction("--mask-offpolicy-in-partial-rollout", True, "--partial-rollout beside it")
        if self.rollout_top_k == 0 or self.eval_top_k == 0:
            raise _contradiction(
                "--rollout-top-k" if self.rollout_top_k == 0 else "--eval-top-k", 0, "-1 (off) or more than 0"
            )
        if self.rm_type == "remote_rm" and not self.rm_url:
            raise _contradiction("--rm-type", "remote_rm", "--rm-url beside it")
        if self.max_prompt_len is not None and self.rollout_max_context_len is not None:
            if self.max_prompt_len >= self.rollout_max_context_len:
                raise _contradiction(
                    "--rollout-max-prompt-len",
                    self.max_prompt_len,
                    f"less than --rollout-max-context-len {self.rollout_max_context_len}",
                )

        self.eval_overrides = check_overrides(self.eval_overrides)
        if self.save_debug_rollout_data is not None:
            from slime.rollout.recordings import check_template

            check_template("--save-debug-rollout-data", self.save_debug_rollout_data, required=True)
        self._check_functions()
        self._check_engines()

    def _check_functions(self) -> None:
        if self.load_forge_rollout_data is not None:
            if self.rollout_function_path not in (DEFAULT_ROLLOUT_FUNCTION, REPLAY_FUNCTION):
                raise _contradiction(
                    "--load-forge-rollout-data",
                    self.load_forge_rollout_data,
                    f"no --rollout-function-path {self.rollout_function_path}: the samples are those of the dump",
                )
            self.rollout_function_path = REPLAY_FUNCTION
        elif self.rollout_function_path == REPLAY_FUNCTION:
            raise _contradiction("--rollout-function-path", REPLAY_FUNCTION, "--load-forge-rollout-data beside it")
        own = self.custom_generate_function_path or self.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION
        if self.max_turns is not None and not own:
            raise _contradiction(
                "--max-turns",
                self.max_turns,
                "--custom-generate-function-path or --rollout-function-path beside it: the default has one turn",
            )

    def _check_engines(self) -> None:
        for address in self.rollout_external_engine_addrs or ():
            port = address.rstrip("/").rpartition(":")[2]
            if not port.isdigit() or not 0 < int(port) < 65536:
                raise _contradiction("--rollout-external-engine-addrs", address, "HOST:PORT")
        if self.rollout_engine_api_key_file is not None and not self.rollout_external_engine_addrs:
            raise InvalidSetting(
                "--rollout-engine-api-key-file requires --rollout-external-engine-addrs: engines that a run starts "
                "get keys of their own",
                field="--rollout-engine-api-key-file", value=self.rollout_engine_api_key_file,
                expected="--rollout-external-engine-addrs",
            )  # fmt: skip
        if self.rollout_num_gpus == 0 and not self.rollout_external_engine_addrs:
            raise _contradiction("--rollout-num-gpus", 0, "--rollout-external-engine-addrs: somebody must generate")
        if self.sglang_args:
            # Reading the flags of SGLang takes time that most runs need not spend.
            from slime.rollout.engines.sglang.flags import check

            self.sglang_args = check(self.sglang_args)
            given = "--sglang-" + next(iter(self.sglang_args)).replace("_", "-")
            if self.rollout_engine == "embedded":
                raise _contradiction("--rollout-engine", "embedded", f"sglang or auto, beside {given}")
            if self.rollout_external_engine_addrs:
                raise _contradiction(given, "given", "no --rollout-external-engine-addrs: their flags are theirs")
        if self.rollout_num_gpus is not None and self.rollout_num_gpus % self.rollout_num_gpus_per_engine:
            raise _contradiction(
                "--rollout-num-gpus",
                self.rollout_num_gpus,
                f"a multiple of --rollout-num-gpus-per-engine {self.rollout_num_gpus_per_engine}",
            )
        if self.rollout_external_engine_addrs and self.rollout_engine == "embedded":
            raise _contradiction("--rollout-engine", "embedded", "no --rollout-external-engine-addrs beside it")

    @property
    def offloads(self) -> bool:
        """Whether the engines' GPU memory is released while the trainer works."""
        return self.colocate if self.offload_rollout is None else self.offload_rollout

    @property
    def max_prompt_len(self) -> int | None:
        """Prompts longer than this are rejected; None: a prompt that does not fit is an error."""
        if self.rollout_max_prompt_len is not None:
            return self.rollout_max_prompt_len
        return None if self.rollout_max_context_len is None else self.rollout_max_context_len - 1


def _contradiction(flag: str, value: object, expected: str) -> InvalidSetting:
    return InvalidSetting(f"{flag}: got {value}, expected {expected}", field=flag, value=value, expected=expected)
