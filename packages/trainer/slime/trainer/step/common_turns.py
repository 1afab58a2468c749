"""Compares samples across ranks: whether prompts of a group are equal, and which turns its samples have in common.

Only the rank that has read a sample knows its tokens. All ranks learn digests of them, and where turns begin and end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.trainer.backends.base import Backend
from slime.trainer.batching.schedule import Lengths
from slime.trainer.batching.trunks import Prefixes, cuts_of, digests_at, prompt_digest, thinned
from slime.trainer.process.collective import Ranks
from slime.types.sample import Sample


def compare(
    plan: dict[str, Any], lengths: Lengths, samples: Mapping[int, Sample], backend: Backend, ranks: Ranks
) -> tuple[Lengths, Prefixes | None]:
    """Returns lengths where only equal prompts are shared, and the prefixes of groups whose samples may have more than
    a prompt in common; None where no group has. Collective.

    samples: that this replica has read. A group whose samples have prompts of one length, and no turns, is compared in
    one exchange; others need a second one, for digests at the cuts of all samples of the group. Samples whose first
    tokens all differ have nothing in common, and need none.
    """
    sets = _groups_of_updates(plan)
    shared = set(lengths.shared())
    wanted = shared.union(*sets)
    known = {p: s for p, s in samples.items() if p in wanted} if backend.leads_replica else {}
    told = _gathered(
        ranks,
        {p: [prompt_digest(s, p) if p in shared else "", cuts_of(s), _first_token(s)] for p, s in known.items()},
    )
    lengths = lengths.split_prompts({p: told[p][0] for p in shared if p in told}) or lengths
    chosen: list[list[int]] = []
    cuts: list[list[int]] = []
    experts_from: dict[int, int] = {}
    for members in sets:
        prompts = {plan["lengths"][p] - plan["response_lengths"][p] for p in members}
        turns = {cut for p in members if p in told for cut in told[p][1]}
        firsts = [told[p][2] for p in members if p in told]
        if (turns or len(prompts) > 1) and len(set(firsts)) < len(firsts):
            experts_from |= dict.fromkeys(members, min(prompts))
            chosen.append(members)
            cuts.append(thinned(cut for cut in prompts | turns if cut > 0))
    if not chosen:
        return lengths, None
    cuts_by_position = {p: found for members, found in zip(chosen, cuts, strict=True) for p in members}
    replays = backend.replayed_experts is not None
    local = {
        p: digests_at(cuts_by_position[p], sample, experts_from[p] if replays else None)
        for p, sample in known.items()
        if p in cuts_by_position and (not sample.multimodal_train_inputs or sample.multimodal_train_input_id)
    }
    return lengths, Prefixes(chosen, cuts, _gathered(ranks, local))


def _first_token(sample: Sample) -> int:
    """Returns the id of the first token; -1 for a sample without tokens."""
    tokens = sample.array("tokens")
    return int(tokens[0]) if len(tokens) else -1


def _groups_of_updates(plan: dict[str, Any]) -> list[list[int]]:
    """Returns the positions of each group, or part of it, that trains in one update, where that is several."""
    found: dict[tuple[int, int], list[int]] = {}
    for number, update in enumerate(plan["updates"]):
        for position in update["train"]:
            found.setdefault((number, plan["groups"][position]), []).append(position)
    return [members for members in found.values() if len(members) > 1]


def _gathered(ranks: Ranks, local: Mapping[int, Any]) -> dict[int, Any]:
    """Returns what all ranks have, by position."""
    by_text = {str(position): value for position, value in local.items()}
    return {int(p): value for of_rank in ranks.gather(by_text) for p, value in of_rank.items()}
