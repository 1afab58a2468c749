"""The state of generation: engines, tokenizer, plug-ins and sampling parameters, once per service or script."""

from __future__ import annotations

import argparse
import asyncio
import copy
import dataclasses
import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary, WeakValueDictionary

from slime.rollout.calls.event_loop import LoopThread
from slime.rollout.engines.base import RemoteEngine
from slime.rollout.engines.gpus import visible_gpus
from slime.rollout.engines.keys import read_key
from slime.rollout.engines.sglang.reserved import tensor_parallel_size
from slime.rollout.fleet.fleet import Fleet
from slime.rollout.fleet.restarts import RestartLimits
from slime.rollout.fleet.watched import FleetOptions
from slime.rollout.generate.submitted import SubmittedGroups
from slime.rollout.plugins import RolloutPlugins, load_generate
from slime.rollout.prompts.encoder import PromptEncoder
from slime.rollout.prompts.tokenizer import context_length, load_tokenizer, reads_images
from slime.rollout.settings.eval_datasets import build_eval_dataset_configs
from slime.rollout.settings.plugin_args import RolloutArgs
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.errors import InvalidSetting, NotAvailable
from slime.types.models.experts import experts_of

ATTRIBUTE = "slime_generate_state"
TEMPLATE_SETTINGS = ("apply_chat_template", "apply_chat_template_kwargs")
# States of this process by key, so that an unpickled namespace finds its own.
_STATES: WeakValueDictionary[str, RolloutState] = WeakValueDictionary()


class RolloutState(SubmittedGroups):
    """Holds what generation needs. Copies of `args` share it.

    fleet: the engines of the trained model. models: those of the others, by name. tokenizer: that of transformers.
    prompts: renders and tokenizes prompts. context_len: maximum tokens of prompt and response together, or None.
    plugins: the user's functions. sampling_params: SGLang's sampling parameters of a training rollout. semaphore:
    limits the samples in flight; plug-ins may use it too.
    """

    def __init__(
        self,
        args: RolloutArgs,
        fleet: Fleet,
        tokenizer: Any,
        plugins: RolloutPlugins,
        models: Mapping[str, Fleet] | None = None,
    ) -> None:
        self.args = args
        self.fleet = fleet
        self.models = dict(models or {})
        self.loop = fleet.loop
        self.tokenizer = tokenizer
        self.prompts = _encoder(args, tokenizer)
        self.context_len = args.rollout_max_context_len or context_length(args.hf_checkpoint)
        self.plugins = plugins
        self._semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self.sampling_params = rollout_sampling_params(args)
        self.stop_texts = stop_texts(args, tokenizer)
        self.prepare_submitting()
        # True after the warning about responses without tokens, which is logged once.
        self.warned_of_text = False
        self._register()
        setattr(args, ATTRIBUTE, self)

    def with_args(self, args: RolloutArgs) -> RolloutState:
        """Returns a copy that has the chat template settings and the generate function of `args`."""
        state = object.__new__(type(self))
        state.__dict__.update(self.__dict__)
        state.args = args
        state.prepare_submitting()
        state._register()
        if any(getattr(args, name) != getattr(self.args, name) for name in TEMPLATE_SETTINGS):
            state.prompts = _encoder(args, self.tokenizer)
        if args.custom_generate_function_path != self.args.custom_generate_function_path:
            state.plugins = copy.copy(self.plugins)
            path = args.custom_generate_function_path
            state.plugins.generate = load_generate(path) if path else None
        setattr(args, ATTRIBUTE, state)
        return state

    def _register(self) -> None:
        self._key = uuid.uuid4().hex
        _STATES[self._key] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> RolloutState:
        """Returns itself: copies of `args` share it."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as a reference: to this state in this process, to None in another, where `state_of` makes one."""
        return _of_this_process, (self._key,)

    @property
    def processor(self) -> Any:
        """The processor of transformers; None for a model that reads text only."""
        return self.prompts.media().processor if reads_images(self.args.hf_checkpoint) else None

    @property
    def semaphore(self) -> asyncio.Semaphore:
        """The semaphore of the running loop: a plug-in may have a loop of its own."""
        loop = asyncio.get_running_loop()
        if loop not in self._semaphores:
            engines = max(1, len(self.fleet.answering))
            self._semaphores[loop] = asyncio.Semaphore(self.args.sglang_server_concurrency * engines)
        return self._semaphores[loop]

    @property
    def seeded(self) -> bool:
        """True where requests carry a sampling seed; SGLang takes one only in its deterministic mode."""
        return bool(self.args.deterministic) or self.fleet.seeded


def _encoder(args: RolloutArgs, tokenizer: Any) -> PromptEncoder:
    return PromptEncoder(
        tokenizer,
        apply_chat_template=args.apply_chat_template,
        template_kwargs=args.apply_chat_template_kwargs,
        hf_checkpoint=args.hf_checkpoint,
    )


def _of_this_process(key: str) -> RolloutState | None:
    return _STATES.get(key)


def state_of(args: RolloutArgs) -> RolloutState:
    """Returns the state that belongs to `args`.

    If it has none, as in a script that calls `generate`, one is made from `args.hf_checkpoint`,
    `args.sglang_router_ip` and `args.sglang_router_port`.
    """
    known: RolloutState | None = getattr(args, ATTRIBUTE, None)
    if known is not None:
        return known
    _fill_defaults(args)
    path = args.rollout_engine_api_key_file
    api_key = read_key(path, "--rollout-engine-api-key-file") if path is not None else None
    engine = RemoteEngine("router", f"http://{args.sglang_router_ip}:{args.sglang_router_port}", api_key=api_key)
    fleet = Fleet([engine], LoopThread())
    fleet.start()
    return RolloutState(args, fleet, load_tokenizer(args.hf_checkpoint), RolloutPlugins(args))


class GenerateState:
    """Compatibility: `GenerateState(args)` in plug-ins is `state_of(args)`."""

    def __new__(cls, args: RolloutArgs) -> RolloutState:  # type: ignore[misc]
        return state_of(args)


def stop_texts(args: RolloutArgs, tokenizer: Any) -> dict[int, str]:
    """Returns {token id: text} for the tokens that end a response: the model's and `--rollout-stop-token-ids`."""
    ids = [getattr(tokenizer, "eos_token_id", None), *(args.rollout_stop_token_ids or ())]
    for name in ("generation_config.json", "config.json"):
        file = Path(args.hf_checkpoint) / name
        eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        ids += eos if isinstance(eos, list) else [eos]
    known = {token for token in ids if isinstance(token, int) and token >= 0}
    return {token: str(tokenizer.decode([token], skip_special_tokens=False)) for token in sorted(known)}


def rollout_sampling_params(args: RolloutArgs) -> dict[str, Any]:
    """Returns SGLang's sampling parameters of a training rollout."""
    return _without_none(
        temperature=args.rollout_temperature,
        top_p=args.rollout_top_p,
        top_k=args.rollout_top_k,
        max_new_tokens=args.rollout_max_response_len,
        stop=args.rollout_stop,
        stop_token_ids=args.rollout_stop_token_ids,
        skip_special_tokens=args.rollout_skip_special_tokens,
        no_stop_trim=True,
        spaces_between_special_tokens=False,
    )


def eval_sampling_params(args: RolloutArgs) -> dict[str, Any]:
    """Returns SGLang's sampling parameters of an evaluation: eval_* where set, else those of training."""

    def first(value: Any, fallback: Any) -> Any:
        return fallback if value is None else value

    return rollout_sampling_params(args) | _without_none(
        temperature=first(args.eval_temperature, args.rollout_temperature),
        top_p=first(args.eval_top_p, args.rollout_top_p),
        top_k=first(args.eval_top_k, args.rollout_top_k),
        max_new_tokens=first(args.eval_max_response_len, args.rollout_max_response_len),
        min_new_tokens=args.eval_min_new_tokens,
        repetition_penalty=getattr(args, "eval_repetition_penalty", None),
    )


def flat_args(
    settings: RolloutSettings,
    fleet: Fleet,
    extra: dict[str, Any] | None = None,
    models: Mapping[str, Fleet] | None = None,
) -> RolloutArgs:
    """Returns the namespace that plug-ins get: the rollout settings, `extra`, the addresses of the engines and of the
    routers, which have to listen already.

    extra: the settings that the launcher adds. models: the engines of models that are not trained, by name.
    """
    args = cast(RolloutArgs, argparse.Namespace(**(extra or {})))
    for name, value in vars(settings).items():
        setattr(args, name, value)
    for name, value in settings.sglang_args.items():
        setattr(args, f"sglang_{name}", value)
    for name, value in other_names(settings, args).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    # `extra` may hold Megatron's flags of these names, whose defaults do not describe the model of the engines.
    vars(args).update(_shape_of_routing(settings))
    if args.over_sampling_batch_size is None:
        args.over_sampling_batch_size = args.rollout_batch_size
    args.rollout_max_prompt_len = settings.max_prompt_len
    args.eval_reward_key = settings.eval_reward_key or settings.reward_key
    args.rollout_engine_urls, args.sglang_model_routers = [], {}
    _set_addresses(args, fleet)
    fleet.on_new_address(lambda: _set_addresses(args, fleet))
    fleets = {model.name: fleet for model in settings.served_models if model.trained} | dict(models or {})
    args.sglang_model_routers |= {name: _router_of(each) for name, each in fleets.items()}
    return args


def _router_of(fleet: Fleet) -> tuple[str | None, int | None]:
    url = urlsplit(fleet.address.url) if fleet.address is not None else None
    return (url.hostname, url.port) if url else (None, None)


def _set_addresses(args: RolloutArgs, fleet: Fleet) -> None:
    """Writes the addresses of the engines into `args`, whose copies share the list and the dictionary."""
    args.rollout_engine_urls[:] = [member.url for member in fleet.members]
    args.sglang_router_ip, args.sglang_router_port = _router_of(fleet)
    args.sglang_model_routers["default"] = (args.sglang_router_ip, args.sglang_router_port)


def other_names(settings: RolloutSettings, args: RolloutArgs) -> dict[str, Any]:
    """Returns the attributes that plug-ins written for slime read from `args` and that are not settings here."""
    return {
        "eval_datasets": build_eval_dataset_configs(args),
        "sglang_tp_size": tensor_parallel_size(settings.rollout_num_gpus_per_engine, settings.sglang_args),
        "sglang_dp_size": 1,
        "sglang_enable_deterministic_inference": settings.deterministic,
        "use_distributed_post": False,
        "use_slime_router": False,
        "ci_test": False,
    }


def _shape_of_routing(settings: RolloutSettings) -> dict[str, int]:
    """Returns the sizes by which `Sample.append_response_tokens` shapes routed experts; empty if none are recorded.

    Raises InvalidSetting for --use-rollout-routing-replay and a model without experts.
    """
    if not settings.use_rollout_routing_replay:
        return {}
    shape = experts_of(json.loads((Path(settings.hf_checkpoint) / "config.json").read_text()))
    if shape is None:
        flag = "--use-rollout-routing-replay"
        raise InvalidSetting.requires(flag, "a mixture of experts", f"{settings.hf_checkpoint} has no experts")
    return {"num_layers": shape.layers, "moe_router_topk": shape.top_k}


def fleet_options(settings: RolloutSettings) -> FleetOptions:
    return FleetOptions(
        concurrency=settings.sglang_server_concurrency,
        tunes_concurrency=settings.rollout_tune_concurrency,
        request_timeout=float(settings.sglang_router_request_timeout_secs),
        health_interval=settings.rollout_health_check_interval,
        health_timeout=settings.rollout_health_check_timeout,
        health_first_wait=settings.rollout_health_check_first_wait,
        routed_experts=settings.use_rollout_routing_replay,
        nuclei=settings.samples_from_nuclei,
        stream_interval=0 if settings.deterministic else settings.rollout_stream_interval,
        restarts=restart_limits(settings),
    )


def restart_limits(settings: RolloutSettings) -> RestartLimits | None:
    """Returns the limits on restarts of an engine; None if engines are not restarted.

    Raises NotAvailable for --use-fault-tolerance with engines that share their GPUs with the trainer.
    """
    shares_gpus = settings.offloads and bool(visible_gpus())
    if settings.use_fault_tolerance and shares_gpus:
        raise NotAvailable.unavailable(
            "--use-fault-tolerance",
            "engines that are offloaded while the trainer works cannot be started again during the run",
            "engines on GPUs of their own, without --colocate and --offload-rollout",
        )
    by_default = not (settings.rollout_external_engine_addrs or shares_gpus)
    if not (by_default if settings.use_fault_tolerance is None else settings.use_fault_tolerance):
        return None
    return RestartLimits(
        most=settings.rollout_engine_max_restarts,
        window_seconds=settings.rollout_engine_restart_window,
        start_seconds=settings.rollout_engine_start_seconds,
    )


def _fill_defaults(args: RolloutArgs) -> None:
    for field in dataclasses.fields(RolloutSettings):
        if not hasattr(args, field.name):
            factory = field.default_factory
            setattr(args, field.name, factory() if factory is not dataclasses.MISSING else field.default)


def _without_none(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
