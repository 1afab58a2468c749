from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rollout_fakes import VOCABULARY, CharTokenizer, FakeEngine

from slime.rollout.calls.event_loop import LoopThread
from slime.rollout.fleet.fleet import Fleet
from slime.rollout.fleet.router_address import RouterAddress
from slime.rollout.generate.state import RolloutState, flat_args, fleet_options
from slime.rollout.plugins import RolloutPlugins
from slime.rollout.settings.rollout import RolloutSettings


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.stop()


@pytest.fixture
def make_state() -> Iterator[Callable[..., RolloutState]]:
    """make_state(engines..., **settings): a state as a service has it, over engines that are there."""
    opened: list[Fleet] = []

    def make(*engines: FakeEngine, **values: Any) -> RolloutState:
        values = {"hf_checkpoint": "none", "rm_type": "exact_partial", "rollout_max_response_len": 4} | values
        settings = RolloutSettings(**values)
        fleet = Fleet(engines, LoopThread(), fleet_options(settings))
        opened.append(fleet)
        fleet.start()
        fleet.loop.run(RouterAddress(fleet, "127.0.0.1").start(), timeout=30)
        return RolloutState(flat_args(settings, fleet), fleet, CharTokenizer(), RolloutPlugins(settings))

    yield make
    for fleet in opened:
        fleet.stop()
        fleet.loop.stop()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer of characters, and a context of 16 tokens."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    directory = tmp_path_factory.mktemp("checkpoint")
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(VOCABULARY)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 16}))
    return directory
