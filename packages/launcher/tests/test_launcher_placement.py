"""Which GPUs go to whom, without any: a plan is made from numbers."""

from __future__ import annotations

from typing import Any

import pytest

from slime.launcher.placement import Placement, plan_placement, shared_devices, trainer_environment
from slime.launcher.settings import LauncherSettings
from slime.rollout.settings import RolloutSettings
from slime.types.errors import InvalidSetting, NotAvailable


def plan(
    gpus: int | list[int],
    *,
    ranks: int = 1,
    nodes: int = 1,
    limit: int | None = None,
    colocate: bool = False,
    free: list[int] | None = None,
    **rollout: Any,
) -> Placement:
    launcher = LauncherSettings(
        num_rollout=1, actor_num_nodes=nodes, actor_num_gpus_per_node=ranks, num_gpus_per_node=limit, colocate=colocate,
        rollout_num_gpus=rollout.get("rollout_num_gpus"),
    )  # fmt: skip
    return plan_placement(launcher, RolloutSettings(hf_checkpoint="m", colocate=colocate, **rollout), gpus, free=free)


@pytest.mark.parametrize("colocate", [False, True])
def test_without_gpus_everything_is_a_process_on_the_cpu(colocate: bool) -> None:
    placement = plan(0, ranks=2, colocate=colocate)
    assert placement == Placement(2) and not placement.has_gpus
    with pytest.raises(InvalidSetting, match="--rollout-num-gpus 4: no GPU here"):
        plan(0, colocate=colocate, rollout_num_gpus=4)


@pytest.mark.parametrize("gpus, ranks, per_engine", [(1, 1, 1), (2, 2, 1), (2, 2, 2), (4, 4, 2), (4, 2, 1)])
def test_colocated_services_share_the_trainers_gpus(gpus: int, ranks: int, per_engine: int) -> None:
    placement = plan(gpus, ranks=ranks, colocate=True, rollout_num_gpus_per_engine=per_engine)
    assert (placement.trainer["num_gpus"], placement.rollout["num_gpus"]) == (1, 0)
    assert placement.shares_gpus and placement.offloads
    options = shared_devices(placement.rollout, ["2", "5"])
    assert options["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] == "2,5" and options["num_gpus"] == 0
    assert not plan(gpus, ranks=ranks, colocate=True, offload_rollout=False).offloads


@pytest.mark.parametrize(
    "gpus, ranks, rollout, wanted",
    [
        (2, 1, {}, 1),
        (4, 2, {"rollout_num_gpus": 2}, 2),
        (4, 1, {"rollout_num_gpus_per_engine": 2}, 2),
        (4, 2, {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2}, 2),
        (1, 1, {"rollout_external_engine_addrs": ["there:1"]}, 0),
        (1, 1, {"rollout_engine": "embedded", "rollout_engine_device": "cpu"}, 0),
    ],
)
def test_engines_of_their_own_take_other_gpus(gpus: int, ranks: int, rollout: dict[str, Any], wanted: int) -> None:
    placement = plan(gpus, ranks=ranks, **rollout)
    assert (placement.trainer_ranks, placement.trainer["num_gpus"], placement.rollout["num_gpus"]) == (ranks, 1, wanted)
    assert not placement.shares_gpus and not placement.offloads


@pytest.mark.parametrize(
    "gpus, ranks, rollout, words",
    [
        (1, 1, {}, ["1 + --rollout-num-gpus 1 = 2 GPUs", "there are 1", "--colocate"]),
        (2, 1, {"rollout_num_gpus": 2}, ["1 + --rollout-num-gpus 2 = 3 GPUs", "there are 2"]),
        (4, 3, {"rollout_num_gpus_per_engine": 2}, ["3 + --rollout-num-gpus 2 = 5 GPUs", "there are 4"]),
        (1, 2, {"colocate": True}, ["2 + --rollout-num-gpus 0 = 2 GPUs", "there are 1"]),
        (4, 2, {"colocate": True, "rollout_num_gpus": 1}, ["--rollout-num-gpus 1", "--colocate", "2"]),
        (4, 2, {"colocate": True, "rollout_num_gpus_per_engine": 4}, ["--rollout-num-gpus-per-engine 4", "2"]),
    ],
)
def test_too_few_gpus_are_an_error_with_the_sum(gpus: int, ranks: int, rollout: dict[str, Any], words: list) -> None:
    with pytest.raises(InvalidSetting) as caught:
        plan(gpus, ranks=ranks, **rollout)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "gpus, nodes, ranks, rollout, trainers, engines",
    [
        ([0, 0], 2, 3, {}, (0, 1), 0),  # no GPUs: processes
        ([0, 0, 0], 2, 1, {}, (0, 1), 2),  # what trains nothing generates
        ([8, 8], 1, 8, {"rollout_num_gpus": 8}, (1,), 0),
        ([8, 8, 8], 2, 8, {"rollout_num_gpus": 8}, (1, 2), 0),
        ([0, 8, 8], 2, 4, {"rollout_num_gpus": 4}, (1, 2), 1),  # a head without GPUs
        ([8, 4, 8], 2, 8, {"rollout_num_gpus": 4}, (0, 2), 1),  # the tightest fit
        ([8, 8], 2, 8, {"rollout_external_engine_addrs": ["there:1"]}, (0, 1), 0),
        ([2, 8], 1, 8, {"colocate": True}, (1,), 1),
    ],
)
def test_ranks_are_spread_over_nodes_and_engines_are_on_one(
    gpus: list[int], nodes: int, ranks: int, rollout: dict[str, Any], trainers: tuple[int, ...], engines: int
) -> None:
    placement = plan(gpus, nodes=nodes, ranks=ranks, **rollout)
    assert (placement.trainer_nodes, placement.rollout_node) == (trainers, engines)
    where = placement.nodes()
    assert [where[f"trainer-{rank}"] for rank in range(nodes * ranks)] == [n for n in trainers for _ in range(ranks)]
    assert (where["buffer"], where["rollout"]) == (0, engines)


def test_nodes_with_free_gpus_come_first_and_others_are_waited_for() -> None:
    placement = plan([8, 8], ranks=4, rollout_num_gpus=4, free=[0, 8])
    assert (placement.trainer_nodes, placement.rollout_node) == ((1,), 1)
    placement = plan([8, 8], ranks=8, rollout_num_gpus=8, free=[0, 8])
    assert {placement.trainer_nodes[0], placement.rollout_node} == {0, 1}


@pytest.mark.parametrize(
    "gpus, options, error, words",
    [
        ([0, 0], {"nodes": 3}, InvalidSetting, ["--actor-num-nodes 3", "2 nodes"]),
        (8, {"nodes": 2}, InvalidSetting, ["--actor-num-nodes 2", "1 node"]),
        ([8, 8], {"nodes": 2, "ranks": 8, "rollout_num_gpus": 8}, InvalidSetting,
         ["--actor-num-nodes 2 x --actor-num-gpus-per-node 8 + --rollout-num-gpus 8 = 24 GPUs", "16 on 2 nodes"]),
        ([8, 4, 4], {"nodes": 2, "ranks": 8}, InvalidSetting, ["17 GPUs", "16 on 3 nodes"]),
        ([8, 4, 8], {"nodes": 2, "ranks": 6, "rollout_num_gpus": 8}, InvalidSetting,
         ["2 nodes with 6 GPUs each and one with 8 others", "8, 4, 8"]),
        ([8, 8], {"limit": 2, "ranks": 4, "rollout_num_gpus": 1}, InvalidSetting, ["5 GPUs", "4 on 2 nodes"]),
        ([4, 4], {"limit": 8}, InvalidSetting, ["--num-gpus-per-node 8", "4"]),
        ([8, 8], {"nodes": 2, "ranks": 8, "colocate": True}, NotAvailable, ["--colocate", "--actor-num-nodes 2"]),
        ([8, 8, 8], {"ranks": 8, "rollout_num_gpus": 16}, NotAvailable, ["--rollout-num-gpus 16", "one node"]),
    ],
)  # fmt: skip
def test_what_no_cluster_like_this_can_hold(
    gpus: int | list[int], options: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        plan(gpus, **options)
    for word in words:
        assert word in str(caught.value)


def test_megatron_gets_the_one_queue_that_it_needs_unless_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False)
    megatron = LauncherSettings(num_rollout=1, train_backend="megatron", colocate=True)
    assert trainer_environment(megatron, gpus=True) == {name: "1"}
    own = LauncherSettings(num_rollout=1, train_backend="megatron", colocate=True, train_env_vars={name: "8"})
    assert trainer_environment(own, gpus=True) == {name: "8"}
    assert name not in trainer_environment(LauncherSettings(num_rollout=1), gpus=True)
    monkeypatch.setenv(name, "32")
    assert name not in trainer_environment(megatron, gpus=True)


def test_both_sides_of_a_broadcast_allocate_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "NCCL_CUMEM_ENABLE"
    monkeypatch.delenv(name, raising=False)
    apart, together = LauncherSettings(num_rollout=1), LauncherSettings(num_rollout=1, colocate=True)
    assert trainer_environment(apart, gpus=True)[name] == "0"
    assert name not in trainer_environment(together, gpus=True)
    assert name not in trainer_environment(apart, gpus=False)
    monkeypatch.setenv(name, "1")
    assert name not in trainer_environment(apart, gpus=True)
