"""The flags that give a run several models, or engines that are not all alike, and the settings of their engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, cast
from urllib.parse import urlsplit

from slime.rollout.engines.kind import DECODE, PREFILL, REGULAR, EngineKind
from slime.rollout.engines.registry import KINDS, counted_by_engines
from slime.rollout.settings.model_file import DEFAULT_MODEL, FLAG, ConfiguredModel, EngineGroup, read_models
from slime.types.errors import ConfigError, InvalidSetting, NotAvailable
from slime.types.setting_values import flag_name
from slime.types.settings import setting

if TYPE_CHECKING:
    from slime.rollout.settings.rollout import RolloutSettings

# The transfer backend of pairs whose memory can be released and taken back.
OFFLOADED_BACKEND = "mooncake"
PREFILL_FLAG = "--prefill-num-servers"
# `--rm-url model://judge/generate` names a model of the run in place of a host.
MODEL_SCHEME = "model"


@dataclass(kw_only=True)
class ModelSettings:
    """Models of the engines."""

    sglang_config: str | None = setting(
        None,
        "YAML file of the models that the engines serve: the trained one and others, such as a judge or a teacher, "
        "each with engines of its own (docs/several-models.md)",
        metavar="FILE",
    )

    prefill_num_servers: int | None = setting(
        None,
        "Number of SGLang engines that only do prefill, each with --rollout-num-gpus-per-engine GPUs; those on the "
        "rest of --rollout-num-gpus decode",
        minimum=1,
    )

    # Settings of a group of engines whose model keeps its own weights.
    FROZEN: ClassVar[Mapping[str, Any]] = {
        "offload_rollout": False, "use_rollout_routing_replay": False, "update_weight_mode": "full",
        "rollout_top_p": 1.0, "rollout_top_k": -1,
    }  # fmt: skip

    @cached_property
    def served_models(self) -> tuple[ConfiguredModel, ...]:
        """The models of --sglang-config, in their order; empty where all engines are alike and of the trained one."""
        settings = cast("RolloutSettings", self)
        if self.prefill_num_servers is not None:
            return (_in_pairs(settings, self.prefill_num_servers),)
        if self.sglang_config is None:
            return ()
        return read_models(self.sglang_config, settings.hf_checkpoint, settings.rollout_num_gpus_per_engine)

    @property
    def models_source(self) -> str:
        """The flag from which `served_models` come, with its value."""
        return (
            f"{PREFILL_FLAG} {self.prefill_num_servers}"
            if self.sglang_config is None
            else f"{FLAG} {self.sglang_config}"
        )

    def place_of(self, group: EngineGroup) -> str:
        """Returns the place of a group in the file, for errors; for the short form that flag, which has no places."""
        return f"{self.models_source}: {group.place}" if self.sglang_config else self.models_source

    def check_models(self) -> None:
        """Sets the numbers of GPUs and engines to the sums of --sglang-config, and checks each group's settings.

        Raises MissingFile, InvalidFile or InvalidSetting; without the flag, InvalidSetting for GPUs that no engine
        would use.
        """
        settings = cast("RolloutSettings", self)
        self._check_reward_url(settings.rm_url, posts=settings.rm_type == "remote_rm")
        if self.sglang_config is not None and self.prefill_num_servers is not None:
            raise InvalidSetting.conflict(PREFILL_FLAG, FLAG, "worker_type in the file says what engines do")
        source = self.models_source
        if self.sglang_config is None and self.prefill_num_servers is None:
            gpus, each = settings.rollout_num_gpus, settings.rollout_num_gpus_per_engine
            if gpus is not None and gpus % each:
                raise InvalidSetting.must_be(
                    "--rollout-num-gpus", f"a multiple of --rollout-num-gpus-per-engine {each}", got=gpus
                )
            return
        if settings.rollout_external_engine_addrs:
            flag = source.split()[0]
            raise InvalidSetting.conflict(
                flag, "--rollout-external-engine-addrs", "the run starts these engines itself"
            )
        if settings.colocate and len(self.served_models) > 1:
            raise InvalidSetting.conflict(
                FLAG, "--colocate", "a trainer shares its GPUs with engines of the model that it trains, not of others"
            )
        groups = [group for model in self.served_models for group in model.groups]
        if groups[0].num_gpus is None and settings.rollout_engine == "auto":
            settings.rollout_engine = next(name for name in KINDS if counted_by_engines(name))
        if settings.rollout_engine in KINDS:
            for group in groups:
                check_group(KINDS[settings.rollout_engine], settings, group)
        if groups[0].num_gpus is None:
            _sum_up(settings, "rollout_num_engines", 1, sum(group.num_engines or 0 for group in groups))
        else:
            _sum_up(settings, "rollout_num_gpus", None, sum(group.num_gpus or 0 for group in groups))
        for model in self.served_models:
            backends: dict[str | None, EngineGroup] = {}
            for group in model.groups:
                try:
                    of_group = group_settings(settings, model, group)
                    if group.num_gpus is not None and settings.rollout_engine == "auto":
                        next(kind for name, kind in KINDS.items() if not counted_by_engines(name)).check(of_group)
                except ConfigError as error:
                    raise error.at(self.place_of(group)) from None
                if group.worker_type != REGULAR:
                    worker = f".worker_type {group.worker_type}" if self.sglang_config else ""
                    backend = of_group.sglang_args.get("disaggregation_transfer_backend")
                    refuse_in_pairs(of_group, f"{self.place_of(group)}{worker}", backend)
                    first = next(iter(backends), backend)
                    if backend != first:
                        field, default = "disaggregation_transfer_backend", f"{OFFLOADED_BACKEND}, the default"
                        raise InvalidSetting.must_be(
                            f"{self.place_of(group)}.overrides.{field}",
                            f"that of {backends[first].place}, {first or default}", got=backend or default,
                            reason="both engines of a pair hand over by one",
                        )  # fmt: skip
                    backends[backend] = group

    def _check_reward_url(self, rm_url: str | None, *, posts: bool) -> None:
        """Raises InvalidSetting for an address that cannot be one. posts: whether a built-in reward posts there; what
        other functions do with it, they know."""
        if rm_url is None:
            return
        try:
            parts = urlsplit(rm_url)
        except ValueError as error:
            raise InvalidSetting.must_be("--rm-url", f"a URL ({error})", got=rm_url) from None
        if parts.scheme != MODEL_SCHEME:
            if posts and (parts.scheme not in ("http", "https") or not parts.hostname):
                expected = f"http://HOST:PORT/PATH, https:// or {MODEL_SCHEME}://NAME/PATH"
                raise InvalidSetting.must_be("--rm-url", expected, got=rm_url, reason="--rm-type remote_rm posts there")
            return
        if parts.query or parts.fragment:
            raise InvalidSetting.must_be(
                "--rm-url", f"{MODEL_SCHEME}://NAME/PATH without ? and #", got=rm_url,
                reason="requests go to the engines of the model, which read their arguments from the body",
            )  # fmt: skip
        if self.sglang_config is None:
            raise InvalidSetting.requires(f"--rm-url {rm_url}", f"{FLAG} FILE", "the file names the models of the run")
        known = list(dict.fromkeys([*(model.name for model in self.served_models), DEFAULT_MODEL]))
        if parts.netloc not in known:
            raise InvalidSetting.unknown(f"model of {FLAG}", parts.netloc, known, field=f"--rm-url {rm_url}")


def _sum_up(settings: RolloutSettings, name: str, default: int | None, total: int) -> None:
    flag = f"--{name.replace('_', '-')}"
    if getattr(settings, name) not in (default, total):
        raise InvalidSetting.must_be(
            flag, f"{total}, the sum over {settings.models_source}, or left out", got=getattr(settings, name)
        )
    setattr(settings, name, total)


def check_group(kind: EngineKind, settings: RolloutSettings, group: EngineGroup) -> None:
    """Raises ConfigError for a group that cannot be of engines of this kind, by their number or their worker type."""
    if settings.sglang_config is None and group.worker_type not in kind.worker_types:
        raise InvalidSetting.conflict(
            f"--rollout-engine {kind.name}", settings.models_source, f"{kind.title} does all of a request itself"
        )
    by_number = counted_by_engines(kind.name)
    if by_number != (group.num_gpus is None):
        raise InvalidSetting.requires(
            f"--rollout-engine {kind.name}",
            f"{'num_engines' if by_number else 'num_gpus'} in {settings.place_of(group)}",
            f"{kind.title} is counted by {'engines' if by_number else 'GPUs'}",
        )
    if group.worker_type not in kind.worker_types:
        raise NotAvailable.unavailable(
            f"{settings.place_of(group)}.worker_type {group.worker_type}",
            f"{kind.title} does all of a request itself", f"worker_type: {REGULAR}",
        )  # fmt: skip


def refuse_in_pairs(settings: RolloutSettings, place: str, backend: str | None) -> None:
    """Raises InvalidSetting for settings that engines which hand requests over do not have.

    backend: the value of disaggregation_transfer_backend; None for SGLang's default, mooncake.
    """
    if settings.offloads and backend not in (None, OFFLOADED_BACKEND):
        # SGLang (0.5.17) registers the cache again with every backend once its memory is back, but only this one takes
        # the registration of the memory that was released away: with others, keys and values go to pages that are gone.
        raise InvalidSetting.conflict(
            "--offload-rollout" if settings.offload_rollout else "--colocate",
            f"disaggregation_transfer_backend {backend} in {place}",
            f"it goes on using memory that was released; give --no-offload-rollout, or the backend {OFFLOADED_BACKEND}",
        )
    nuclei = "the engine that decodes lacks the nucleus of the first token"
    for name, wanted, reason in (
        ("rollout_top_p", settings.rollout_top_p < 1, nuclei),
        ("rollout_top_k", settings.rollout_top_k > 0, nuclei),
        ("use_rollout_routing_replay", settings.use_rollout_routing_replay, "it lacks the experts of the prompt"),
        ("deterministic", settings.deterministic, "its batches depend on when requests are handed over"),
    ):
        if wanted:
            raise InvalidSetting.conflict(flag_name(name), place, reason)


def _in_pairs(settings: RolloutSettings, prefill: int) -> ConfiguredModel:
    """Returns the trained model on so many engines that do prefill, and others that decode."""
    each, total = settings.rollout_num_gpus_per_engine, settings.rollout_num_gpus
    least = (prefill + 1) * each
    if total is None or total < least or total % each:
        # Engines that share the trainer's GPUs have all of them.
        flag = "--actor-num-gpus-per-node" if settings.colocate else "--rollout-num-gpus"
        raise InvalidSetting.requires(
            f"{PREFILL_FLAG} {prefill}", f"{flag} N, a multiple of {each} and at least {least}",
            f"{each * prefill} of the GPUs do prefill, and the rest decode",
        )  # fmt: skip
    parts = ((PREFILL, prefill * each), (DECODE, total - prefill * each))
    groups = tuple(EngineGroup(worker, worker, gpus, None, each, {}) for worker, gpus in parts)
    return ConfiguredModel(DEFAULT_MODEL, settings.hf_checkpoint, True, groups)


def trained_server_args(settings: RolloutSettings) -> list[Mapping[str, Any]]:
    """Returns the flags of SGLang's server, by name, of each group of the trained model's engines."""
    groups = [(model, group) for model in settings.served_models if model.trained for group in model.groups]
    return [group_settings(settings, *each).sglang_args for each in groups] or [settings.sglang_args]


def group_settings(settings: RolloutSettings, model: ConfiguredModel, group: EngineGroup) -> RolloutSettings:
    """Returns the settings of the engines of one group. Raises ConfigError for overrides that they cannot have."""
    of_model: dict[str, Any] = {} if model.trained else {**ModelSettings.FROZEN}
    args = dict(settings.sglang_args)
    if group.overrides:
        from slime.rollout.engines.sglang.flags import check

        args |= check(group.overrides, f"{group.place}.overrides")
    return dataclasses.replace(
        settings, **of_model, sglang_config=None, prefill_num_servers=None, hf_checkpoint=model.path,
        rollout_num_gpus=group.num_gpus, rollout_num_engines=group.num_engines or 1,
        rollout_num_gpus_per_engine=group.num_gpus_per_engine, sglang_args=args, rm_type=None, rm_url=None,
    )  # fmt: skip
