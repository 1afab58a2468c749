"""The rollout function for remote agents.

Used with `--rollout-function-path slime.rollout.agents.rollout.generate_rollout`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slime.rollout.agents.episodes import Episodes, shared_episodes
from slime.rollout.agents.settings import AgentSettings
from slime.rollout.calls.call import CALL
from slime.rollout.calls.outputs import RolloutFnEvalOutput, RolloutFnTrainOutput, flatten
from slime.rollout.generate.filters import DynamicFilterOutput
from slime.rollout.generate.group import run_hooks
from slime.rollout.generate.state import RolloutState, eval_sampling_params, rollout_sampling_params, state_of
from slime.rollout.metrics import agent_metrics
from slime.rollout.rewards import apply_overlong_rules
from slime.rollout.settings.eval_overrides import set_args
from slime.types import Sample
from slime.types.errors import InvalidField

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs

log = logging.getLogger(__name__)


def generate_rollout(
    args: RolloutArgs, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Generates `args.rollout_batch_size` groups of episodes for prompts of `data_source`, or runs evaluation sets.

    A function for `--rollout-function-path`; its settings are those of `AgentSettings`. Blocks until done.

    Raises ConfigError or a subclass for settings that cannot work, EngineError if an engine dies. An episode that fails
    becomes a FAILED sample.
    """
    settings = AgentSettings.from_args(args)
    state = state_of(args)
    work = _evaluate(state, args, settings, data_source) if evaluation else _train(state, args, settings, data_source)
    return state.loop.run(state.fleet.guard(work))  # type: ignore[arg-type, return-value]


async def _train(state: RolloutState, args: RolloutArgs, settings: AgentSettings, source: Any) -> RolloutFnTrainOutput:
    target: int = args.rollout_batch_size
    accepted: list[list[list[Sample]]] = []
    dropped: dict[str, int] = {}
    params = rollout_sampling_params(args)

    async def play_group(episodes: Episodes, group: list[Sample]) -> None:
        done = await _all([episodes.run(sample, params) for sample in group])
        samples = flatten(done)
        await run_hooks(state, samples, False)
        apply_overlong_rules(args, samples, "the agent", False)
        reason = _verdict(state, args, done)
        if reason is None:
            accepted.append(done)
            await _complete(state, source, done, group)
        else:
            dropped[reason] = dropped.get(reason, 0) + 1
            await asyncio.to_thread(source.reject, group, reason)

    async with shared_episodes(state, settings) as episodes:
        while len(accepted) < target:
            leased = await asyncio.to_thread(source.get_samples, target - len(accepted))
            await _all([play_group(episodes, group) for group in leased])
    accepted.sort(key=lambda group: group[0][0].group_index or 0)
    if state.plugins.sample_filter is not None:
        await asyncio.to_thread(state.plugins.sample_filter, args, accepted)
    metrics: dict[str, Any] = agent_metrics(flatten(accepted))
    metrics |= {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in dropped.items()}
    return RolloutFnTrainOutput(samples=accepted, metrics=metrics)  # type: ignore[arg-type]


async def _all(work: Sequence[Any]) -> list[Any]:
    """Returns the results in order; if one raises, cancels the others, waits for them, and passes the error on."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _verdict(state: RolloutState, args: RolloutArgs, group: list[list[Sample]]) -> str | None:
    """Returns why the dynamic filter drops a group, or None; the filter sees only episodes that did not fail."""
    judge = state.plugins.dynamic_filter
    scored = [episode for episode in group if not _failed(episode)]
    if judge is None or not scored:
        return None
    verdict = DynamicFilterOutput.of(judge(args, flatten(scored)))
    return None if verdict.keep else verdict.reason or "filtered"


async def _complete(state: RolloutState, source: Any, done: list[list[Sample]], group: list[Sample]) -> None:
    # --rollout-sample-filter-path must see the groups before they are handed in. With it, and where the source does not
    # take single groups, the service hands them in after the call.
    if state.plugins.sample_filter is not None or not hasattr(source, "complete"):
        return
    await asyncio.to_thread(source.complete, flatten(done), group)
    call = CALL.get()
    if call is not None:
        call.advance()


async def _evaluate(
    state: RolloutState, args: RolloutArgs, settings: AgentSettings, source: Any
) -> RolloutFnEvalOutput:
    names = _names(args, source)
    sets: dict[str, list[Sample]] = {}
    for name in names:
        count = set_args(args, name).n_samples_per_eval_prompt
        sets[name] = flatten(await asyncio.to_thread(source.read, name, count))
    call = CALL.get()
    if call is not None:
        call.total = sum(len(samples) for samples in sets.values())
    output = RolloutFnEvalOutput(metrics={})
    async with shared_episodes(state, settings) as episodes:
        for name, samples in sets.items():
            params = eval_sampling_params(set_args(args, name))
            done = await _all([_counted(episodes, sample, params) for sample in samples])
            rewards = [_reward(args, episode) for episode in done]
            output.data[name] = {
                "rewards": rewards,
                "truncated": [episode[-1].status is Sample.Status.TRUNCATED for episode in done],
                "samples": [episode[-1] for episode in done],
            }
            assert output.metrics is not None
            output.metrics |= {
                f"eval/{name}": sum(rewards) / max(len(rewards), 1),
                f"eval/{name}-accuracy": sum(reward > 0 for reward in rewards) / max(len(rewards), 1),
                f"eval/{name}-n_samples": len(rewards),
                f"eval/{name}-failed": sum(_failed(episode) for episode in done),
            }
    return output


async def _counted(episodes: Episodes, sample: Sample, params: dict[str, Any]) -> list[Sample]:
    done = await episodes.run(sample, params)
    await run_hooks(episodes.state, done, True)
    call = CALL.get()
    if call is not None:
        call.advance()
    return done


def _names(args: RolloutArgs, source: Any) -> list[str]:
    """Returns the names of `args.eval_datasets`, or of all sets of `source`. Raises InvalidField if one is unknown."""
    known = list(getattr(source, "names", ()))
    wanted = [str(getattr(each, "name", each)) for each in getattr(args, "eval_datasets", None) or known]
    for name in wanted:
        if name not in known:
            raise InvalidField("eval_datasets", name, f"one of the evaluation sets: {', '.join(known) or 'none'}")
    return wanted


def _reward(args: RolloutArgs, episode: list[Sample]) -> float:
    """Returns the reward of an episode, 0 for one that failed, because it has solved nothing."""
    return 0.0 if _failed(episode) else float(episode[-1].get_reward_value(args))


def _failed(episode: list[Sample]) -> bool:
    return episode[0].status is Sample.Status.FAILED
