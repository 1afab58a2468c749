"""`reasoning_gym:NAME?...` as prompt data, against the package itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.buffer.sources.base import Columns
from slime.buffer.sources.dataset import read_dataset
from slime.types.errors import InvalidSetting, NotAvailable
from slime.types.prompt_files.slices import split_slice


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "slime" / "datasets"


def test_a_generated_data_set_is_read_as_a_file_of_prompts(cache: Path) -> None:
    import reasoning_gym

    source = "reasoning_gym:chain_sum?size=12&seed=7&min_terms=2&max_terms=2"
    dataset = read_dataset(source, Columns(label="label"))
    entries = list(reasoning_gym.create_dataset("chain_sum", size=12, seed=7, min_terms=2, max_terms=2))
    assert [prompt.prompt for prompt in dataset.prompts] == [entry["question"] for entry in entries]
    assert [prompt.label for prompt in dataset.prompts] == [entry["answer"] for entry in entries]
    metadata = dataset.prompts[0].metadata
    assert metadata["rm_type"] == "reasoning_gym" and metadata["entry"]["answer"] == entries[0]["answer"]
    # The place in the data of a resumed run requires the same prompts.
    assert read_dataset(source, Columns(label="label")).identity == dataset.identity
    assert len(list(cache.iterdir())) == 1


def test_a_slice_and_defaults_that_do_not_change_between_starts(cache: Path) -> None:
    part = read_dataset("reasoning_gym:spell_backward?size=5@[3:]", Columns())
    assert len(part) == 2
    path, rows = split_slice("reasoning_gym:spell_backward?size=5@[3:]")
    assert Path(path).parent == cache and rows == slice(3, None)
    assert len(read_dataset("reasoning_gym:spell_backward", Columns())) == 1000
    before = {file.name: file.read_text() for file in cache.iterdir()}
    for file in cache.iterdir():
        file.unlink()
    read_dataset("reasoning_gym:spell_backward", Columns())
    assert all(before[file.name] == file.read_text() for file in cache.iterdir())


def test_options_are_numbers_texts_and_lists(cache: Path) -> None:
    source = "reasoning_gym:number_format?size=2&max_delta=5.5&max_num_candidates=4&seed=1"
    assert len(read_dataset(source, Columns())) == 2
    row = json.loads(next(cache.iterdir()).read_text().splitlines()[0])
    assert row.keys() == {"input", "label", "metadata"}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("chain_sums", "--prompt-data: unknown reasoning-gym data set 'chain_sums'; did you mean chain_sum?"),
        ("../x?size=2", "--prompt-data must be reasoning_gym:NAME"),
        (
            "chain_sum?sizes=3",
            "--prompt-data reasoning_gym:chain_sum.sizes=3: reasoning-gym refuses these options",
        ),
        ("chain_sum?min_terms=9&max_terms=2", "refuses these options: AssertionError"),
    ],
)
def test_a_wrong_name_or_option_is_named(source: str, words: str, cache: Path) -> None:
    with pytest.raises(InvalidSetting, match=words.replace("?", ".")):
        read_dataset(f"reasoning_gym:{source}", Columns())
    assert not cache.exists()


def test_problems_that_cannot_be_made_are_an_error_of_the_options(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from reasoning_gym.arithmetic.chain_sum import ChainSumDataset

    def fail(self: ChainSumDataset, index: int) -> None:
        raise RuntimeError("no problem of this size")

    monkeypatch.setattr(ChainSumDataset, "__getitem__", fail)
    source = "reasoning_gym:chain_sum?size=3"
    with pytest.raises(
        InvalidSetting, match=r"--prompt-data \S+: reasoning-gym fails at problem 0: RuntimeError: no pro"
    ):
        read_dataset(source, Columns())
    assert not list(cache.glob("*.jsonl"))


def test_a_data_set_whose_scorer_needs_more_than_json_is_refused(cache: Path) -> None:
    with pytest.raises(NotAvailable, match="its scorer needs more than JSON can hold"):
        read_dataset("reasoning_gym:rearc?size=1", Columns())
    assert not list(cache.glob("*.jsonl"))
