"""Settings of the embedded engine; its command line comes from them."""

from __future__ import annotations

from dataclasses import dataclass

from slime.rollout.chat.syntaxes.registry import REASONING_PARSERS, TOOL_CALL_PARSERS
from slime.types.settings import REQUIRED, setting

# Models whose forward pass on a CPU is `DenseModel`; it holds a second copy of their matrices, packed.
PACKED_MODELS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(kw_only=True)
class EmbeddedOptions:
    """The embedded engine."""

    model_path: str = setting(REQUIRED, "HF directory: config.json, weights, tokenizer", metavar="DIR")
    host: str = setting("127.0.0.1", "Address to listen on; other than loopback requires --api-key-file")
    api_key_file: str | None = setting(
        None,
        "File with the key that calls must carry as Authorization: Bearer; required to listen beyond loopback",
        metavar="FILE",
    )
    allowed_host: list[str] = setting(
        list, "Further host name by which callers may address the engine; repeatable", append=True
    )
    port: int = setting(0, "Port to listen on; 0 lets the system choose", minimum=0, maximum=65535)
    served_model_name: str | None = setting(None, "Name in /v1/models; the directory's name by default")
    tool_call_parser: str | None = setting(
        None,
        "Syntax of the model's tool calls, which become `tool_calls` of chat completions; without it requests with "
        "tools are refused",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str | None = setting(
        None,
        "Syntax of the model's reasoning, which is kept apart from the content of an answer; by default it is content",
        choices=REASONING_PARSERS,
    )
    device: str = setting("auto", "Device of the model; auto: cuda if there is one", choices=("auto", "cpu", "cuda"))
    dtype: str = setting(
        "auto", "Data type of the weights; auto: as in config.json", choices=("auto", "float32", "bfloat16", "float16")
    )
    threads: int | None = setting(None, "CPU threads of torch; OMP_NUM_THREADS or all cores by default", minimum=1)
    context_length: int | None = setting(
        None, "Maximum tokens of prompt and response; from config.json by default", minimum=2
    )
    enable_return_routed_experts: bool = setting(
        False, "Record which experts each token is sent to, for requests with return_routed_experts"
    )
    max_running_requests: int = setting(256, "Maximum number of sequences decoded together; more wait", minimum=1)
    max_prefill_tokens: int = setting(16384, "Maximum prompt tokens, padding included, in one forward pass", minimum=1)
    max_total_tokens: int | None = setting(
        None,
        "Maximum tokens of running sequences, padding included, whose keys and values are held; more wait. As many as "
        "--memory-fraction holds by default",
        minimum=1,
    )
    memory_fraction: float = setting(
        0.5,
        "Part of the memory of the machine, or of the GPU, that keys and values may fill: the weights and other "
        "processes need theirs",
        above=0,
        maximum=1,
    )
    gather_ms: float = setting(
        2.0, "Milliseconds that an idle engine waits for more requests to batch with the first", minimum=0
    )
    deterministic: bool = setting(False, "Each HTTP request is a batch of its own, served in order of arrival")
    random_seed: int | None = setting(
        None, "Seed for requests without sampling_seed; from the system by default", minimum=0
    )
    weight_version: str = setting("0", "Version of the weights in --model-path")
    announce_fd: int | None = setting(
        None, "File descriptor that gets one JSON line when the engine serves or fails to", minimum=0
    )
    parent_fd: int | None = setting(None, "File descriptor of a pipe whose end of file ends the engine", minimum=0)
