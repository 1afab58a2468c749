"""Ranks of one replica share a vocabulary that is cut over them, and samples that one of them reads."""

from typing import Any

import pytest
from trainer_processes import results_of


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    directory = tmp_path_factory.mktemp("ranks")
    return results_of("trainer_megatron_sharing.py", 2, directory, directory)


@pytest.mark.parametrize("of", ["log_probs", "entropy", "gradient"])
def test_a_vocabulary_cut_over_ranks_equals_the_whole_in_float64(results: dict[str, list[Any]], of: str):
    for of_rank in results["vocabulary"]:
        assert len(of_rank) == 12
        assert [case["case"] for case in of_rank if not case[of] < 2e-5] == []


def test_one_rank_of_a_replica_reads_and_the_others_have_the_same(results: dict[str, list[Any]]):
    first, second = results["reading"]
    assert first["1"] == [[], True, 3, 0]
    assert second["1"] == [[[5, 0, 7]], True, 3, 0]


def test_ranks_of_a_replica_that_have_blobs_in_common_read_for_themselves(results: dict[str, list[Any]]):
    assert [result["1 each"] for result in results["reading"]] == [[[[5, 0, 7]], True, 3, 0]] * 2


def test_replicas_of_one_rank_read_for_themselves(results: dict[str, list[Any]]):
    assert [result["2"] for result in results["reading"]] == [[[[0]], True, 1, 0], [[[1]], True, 1, 0]]


def test_what_one_rank_cannot_read_is_an_error_on_all_and_they_stay_in_step(results: dict[str, list[Any]]):
    (first, after_first), (second, after_second) = results["failing"]
    assert second.startswith("InvalidField: positions")
    assert first.startswith("InvalidField: rank 1: InvalidField: positions")
    assert after_first == after_second == 2
