"""Placement of trainers and engines on GPUs, planned from numbers alone."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.launcher.config.settings import LauncherSettings
from slime.launcher.placement.plan import (
    Placement,
    core_environment,
    plan_placement,
    shared_devices,
    trainer_environment,
)
from slime.rollout.settings.rollout import RolloutSettings
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
    with pytest.raises(InvalidSetting, match="--rollout-num-gpus 4 requires a machine with GPUs"):
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
        (1, 1, {"rollout_engine_device": "cpu"}, 0),
    ],
)
def test_engines_of_their_own_take_other_gpus(gpus: int, ranks: int, rollout: dict[str, Any], wanted: int) -> None:
    placement = plan(gpus, ranks=ranks, **rollout)
    assert (placement.trainer_ranks, placement.trainer["num_gpus"], placement.rollout["num_gpus"]) == (ranks, 1, wanted)
    assert not placement.shares_gpus and not placement.offloads


@pytest.mark.parametrize(
    "gpus, ranks, rollout, words",
    [
        (1, 1, {}, ["1 + --rollout-num-gpus 1 = 2 GPUs", "the node has 1", "--colocate"]),
        (2, 1, {"rollout_num_gpus": 2}, ["1 + --rollout-num-gpus 2 = 3 GPUs", "the node has 2"]),
        (4, 3, {"rollout_num_gpus_per_engine": 2}, ["3 + --rollout-num-gpus 2 = 5 GPUs", "the node has 4"]),
        (1, 2, {"colocate": True}, ["2 + --rollout-num-gpus 0 = 2 GPUs", "the node has 1"]),
        (4, 2, {"colocate": True, "rollout_num_gpus": 1}, ["--rollout-num-gpus must be 2", "--colocate", "got 1"]),
        (
            4,
            2,
            {"colocate": True, "rollout_num_gpus_per_engine": 4},
            ["must be a divisor of", "2, got 4"],
        ),
    ],
)
def test_too_few_gpus_are_an_error_with_the_sum(gpus: int, ranks: int, rollout: dict[str, Any], words: list) -> None:
    with pytest.raises(InvalidSetting) as caught:
        plan(gpus, ranks=ranks, **rollout)
    for word in words:
        assert word in str(caught.value)


def where(placement: Placement) -> tuple[tuple[int, ...], dict[int, int]]:
    """The trainer's nodes, and GPUs of the engines by node."""
    return placement.trainer_nodes, {share.node: share.gpus for share in placement.engines}


@pytest.mark.parametrize(
    "gpus, nodes, ranks, rollout, trainers, engines",
    [
        ([0, 0], 2, 3, {}, (0, 1), {0: 0}),  # no GPUs: processes
        ([0, 0, 0], 2, 1, {}, (0, 1), {2: 0}),  # what trains nothing generates
        ([8, 8], 1, 8, {"rollout_num_gpus": 8}, (1,), {0: 8}),
        ([8, 8, 8], 2, 8, {"rollout_num_gpus": 8}, (1, 2), {0: 8}),
        ([0, 8, 8], 2, 4, {"rollout_num_gpus": 4}, (1, 2), {1: 4}),  # a head without GPUs
        ([8, 4, 8], 2, 8, {"rollout_num_gpus": 4}, (0, 2), {1: 4}),  # the tightest fit
        ([8, 8], 2, 8, {"rollout_external_engine_addrs": ["there:1"]}, (0, 1), {0: 0}),
        ([2, 8], 1, 8, {"colocate": True}, (1,), {1: 8}),
        ([8, 8, 8], 1, 8, {"rollout_num_gpus": 16}, (0,), {1: 8, 2: 8}),
        ([8, 8], 1, 4, {"rollout_num_gpus": 12}, (0,), {0: 4, 1: 8}),
        ([8, 7, 8], 1, 8, {"rollout_num_gpus": 12, "rollout_num_gpus_per_engine": 2}, (0,), {1: 4, 2: 8}),
        ([6, 8, 6], 1, 5, {"rollout_num_gpus": 12, "rollout_num_gpus_per_engine": 4}, (0,), {1: 8, 2: 4}),
        ([8, 8], 2, 8, {"colocate": True}, (0, 1), {0: 8, 1: 8}),
        ([4, 8, 8], 2, 8, {"colocate": True, "rollout_num_gpus": 16}, (1, 2), {1: 8, 2: 8}),
        ([8, 8, 8], 1, 8, {"rollout_num_gpus_per_engine": 16}, (0,), {1: 8, 2: 8}),
        ([8, 8, 8, 4], 1, 4, {"rollout_num_gpus_per_engine": 24}, (3,), {0: 8, 1: 8, 2: 8}),
        (
            [8, 8, 8, 8],
            4,
            8,
            {"colocate": True, "rollout_num_gpus_per_engine": 16},
            (0, 1, 2, 3),
            dict.fromkeys(range(4), 8),
        ),
        ([8, 8], 2, 8, {"colocate": True, "rollout_engine": "embedded"}, (0, 1), {0: 8}),  # of which there is one
    ],
)
def test_ranks_and_engines_are_spread_over_nodes(
    gpus: list[int], nodes: int, ranks: int, rollout: dict[str, Any], trainers: tuple[int, ...], engines: dict[int, int]
) -> None:
    placement = plan(gpus, nodes=nodes, ranks=ranks, **rollout)
    assert where(placement) == (trainers, engines)
    found = placement.nodes()
    assert [found[f"trainer-{rank}"] for rank in range(nodes * ranks)] == [n for n in trainers for _ in range(ranks)]
    assert (found["buffer"], found["rollout"]) == (0, next(iter(engines)))
    hosts = list(engines) if len(engines) > 1 else []
    assert [found[name] for name in placement.engine_hosts()] == hosts


def test_an_engine_of_more_gpus_than_a_node_is_on_several() -> None:
    colocated = plan([8] * 4, nodes=4, ranks=8, colocate=True, rollout_num_gpus_per_engine=16)
    assert [(share.node, share.nodes, share.part) for share in colocated.engines] == [
        (0, 2, 0), (1, 2, 1), (2, 2, 0), (3, 2, 1),
    ]  # fmt: skip
    assert list(colocated.engine_hosts()) == ["engines-0", "engines-1", "engines-2", "engines-3"]
    apart = plan([8] * 5, ranks=8, rollout_num_gpus=32, rollout_num_gpus_per_engine=16)
    assert [(share.node, share.gpus, share.part) for share in apart.engines] == [
        (1, 8, 0),
        (2, 8, 1),
        (3, 8, 0),
        (4, 8, 1),
    ]
    assert [apart.engine_options(share)["num_gpus"] for share in apart.engines] == [8] * 4


@pytest.mark.parametrize(
    ("free", "engines"),
    [
        ([8, 4, 4, 4, 4, 0, 0], {1: 8, 2: 8}),  # not on four nodes: it waits for two
        ([8, 4, 4, 8, 4, 8, 0], {3: 8, 5: 8}),
    ],
)
def test_a_wide_engine_waits_for_whole_nodes(free: list[int], engines: dict[int, int]) -> None:
    placement = plan([8] * 7, ranks=8, rollout_num_gpus=16, rollout_num_gpus_per_engine=16, free=free)
    assert where(placement) == ((0,), engines)
    assert [share.nodes for share in placement.engines] == [2, 2]


def test_of_engines_on_several_nodes_each_holds_its_own_gpus_unless_they_are_the_trainers() -> None:
    apart = plan([8, 8, 8], ranks=8, rollout_num_gpus=16)
    assert [apart.engine_options(share)["num_gpus"] for share in apart.engine_hosts().values()] == [8, 8]
    together = plan([8, 8], ranks=8, nodes=2, colocate=True)
    assert together.shares_gpus and together.offloads
    assert [together.engine_options(share)["num_gpus"] for share in together.engine_hosts().values()] == [0, 0]
    for placement in (apart, together):
        assert not placement.rollout.get("num_gpus"), "it starts no engine"


@pytest.mark.parametrize(
    "count, nodes, colocate, engines, wanted",
    [
        (2, 2, True, 3, {0: 2, 1: 1}),
        (2, 2, True, 1, {0: 1}),
        (3, 2, True, 1, {2: 1}),
        (2, 2, False, 3, {0: 3}),
        (4, 2, False, 3, {2: 2, 3: 1}),
        (1, 1, True, 2, {0: 2}),
        (3, 1, True, 2, {1: 1, 2: 1}),
    ],
)
def test_without_gpus_embedded_engines_are_divided_over_nodes(
    count: int, nodes: int, colocate: bool, engines: int, wanted: dict[int, int]
) -> None:
    placement = plan([0] * count, nodes=nodes, colocate=colocate, rollout_num_engines=engines)
    assert {share.node: share.embedded for share in placement.engines} == wanted


@settings(deadline=None)
@given(
    gpus=st.lists(st.integers(0, 8), min_size=1, max_size=5).filter(any),
    nodes=st.integers(1, 4),
    ranks=st.integers(1, 8),
    per_engine=st.sampled_from([1, 2, 3, 4, 8]),
    engines=st.integers(1, 8),
    colocate=st.booleans(),
    data=st.data(),
)
def test_a_plan_gives_every_gpu_once_and_every_engine_one_node_unless_it_is_larger(
    gpus: list[int], nodes: int, ranks: int, per_engine: int, engines: int, colocate: bool, data: st.DataObject
) -> None:
    free = [data.draw(st.integers(0, count)) for count in gpus]
    asked = None if colocate else engines * per_engine
    options = dict(rollout_num_gpus=asked, rollout_num_gpus_per_engine=per_engine, rollout_engine="sglang")
    try:
        placement = plan(gpus, nodes=nodes, ranks=ranks, colocate=colocate, free=free, **options)
    except InvalidSetting:
        if colocate:
            fills = ranks % per_engine == 0 or (per_engine % ranks == 0 and nodes * ranks % per_engine == 0)
            assert not fills or sum(count >= ranks for count in gpus) < nodes
        else:
            assert not fits(gpus, nodes, ranks, engines, per_engine)
        return
    trainers, shares = where(placement)
    assert len(set(trainers)) == nodes and len(shares) == len(placement.engines)
    for share in placement.engines:
        wide = share.gpus * share.nodes == per_engine > (ranks if colocate else max(gpus))
        assert share.gpus > 0 and (share.gpus % per_engine == 0 or wide)
    if colocate:
        assert shares == dict.fromkeys(trainers, ranks)
        return
    assert sum(shares.values()) == asked
    for node, count in enumerate(gpus):
        assert shares.get(node, 0) + (ranks if node in trainers else 0) <= count


def fits(gpus: list[int], nodes: int, ranks: int, engines: int, per_engine: int) -> bool:
    """By trying every choice of nodes for the trainer."""
    return any(
        all(gpus[i] >= ranks for i in chosen)
        and sum((n - (ranks if i in chosen else 0)) // per_engine for i, n in enumerate(gpus)) >= engines
        for chosen in itertools.combinations(range(len(gpus)), nodes)
    )


def test_nodes_with_free_gpus_come_first_and_others_are_waited_for() -> None:
    assert where(plan([8, 8], ranks=4, rollout_num_gpus=4, free=[0, 8])) == ((1,), {1: 4})
    trainers, engines = where(plan([8, 8], ranks=8, rollout_num_gpus=8, free=[0, 8]))
    assert {*trainers, *engines} == {0, 1}
    assert where(plan([8, 8, 8], ranks=4, rollout_num_gpus=8, free=[4, 8, 0])) == ((0,), {1: 8})


@pytest.mark.parametrize(
    "gpus, options, error, words",
    [
        ([0, 0], {"nodes": 3}, InvalidSetting, ["--actor-num-nodes must be at most 2, got 3", "2 nodes"]),
        (8, {"nodes": 2}, InvalidSetting, ["--actor-num-nodes must be at most 1, got 2", "1 node"]),
        ([8, 8], {"nodes": 2, "ranks": 8, "rollout_num_gpus": 8}, InvalidSetting,
         ["--actor-num-nodes 2 x --actor-num-gpus-per-node 8 + --rollout-num-gpus 8 = 24 GPUs", "the 2 nodes have 16"]),
        ([8, 4, 4], {"nodes": 2, "ranks": 8}, InvalidSetting, ["17 GPUs", "the 3 nodes have 16"]),
        ([8, 4, 8], {"nodes": 2, "ranks": 6, "rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 8}, InvalidSetting,
         ["2 nodes with 6 GPUs each and 8 others for engines of 8: the 3 nodes have 8, 4, 8"]),
        ([8, 8], {"limit": 2, "ranks": 4, "rollout_num_gpus": 1}, InvalidSetting, ["5 GPUs", "the 2 nodes have 4"]),
        ([4, 4], {"limit": 8}, InvalidSetting, ["--num-gpus-per-node must be at most 4, got 8"]),
        (0, {"limit": 3}, InvalidSetting, ["--num-gpus-per-node 3 requires nodes with 3 GPUs: ", "--dry-run-gpus 3"]),
        ([8, 8], {"nodes": 2, "ranks": 8, "colocate": True, "rollout_num_gpus": 8}, InvalidSetting,
         ["--rollout-num-gpus must be 16", "--actor-num-nodes 2 x --actor-num-gpus-per-node 8", "16"]),
        ([8, 8, 8], {"nodes": 3, "ranks": 8, "colocate": True, "rollout_num_gpus_per_engine": 16}, InvalidSetting,
         ["--rollout-num-gpus-per-engine must be a divisor of --actor-num-gpus-per-node 8, or whole nodes that divide "
          "--actor-num-nodes 3, got 16"]),
        ([8, 8], {"nodes": 2, "ranks": 8, "colocate": True, "rollout_num_gpus_per_engine": 3}, InvalidSetting,
         ["--rollout-num-gpus-per-engine must be a divisor of --actor-num-gpus-per-node 8", "got 3"]),
        ([8, 8, 8, 4], {"ranks": 4, "nodes": 2, "rollout_num_gpus_per_engine": 20}, InvalidSetting,
         ["2 nodes with 4 GPUs each and 20 others for engines of 20", "8, 8, 8, 4"]),
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


def test_processes_without_a_gpu_divide_the_cores_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "OMP_NUM_THREADS"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("slime.launcher.placement.plan.cpus", lambda: 8)
    for ranks, threads in ((1, "8"), (3, "2"), (16, "1")):
        settings = LauncherSettings(num_rollout=1, actor_num_gpus_per_node=ranks)
        assert trainer_environment(settings, gpus=False)[name] == core_environment(ranks, 576)[name] == threads
    assert name not in trainer_environment(settings, gpus=True)
    assert trainer_environment(LauncherSettings(num_rollout=1), gpus=False, hidden_size=64)[name] == "1"
    own = LauncherSettings(num_rollout=1, train_env_vars={name: "5"})
    assert trainer_environment(own, gpus=False)[name] == "5"
    monkeypatch.setenv(name, "3")
    assert name not in trainer_environment(LauncherSettings(num_rollout=1), gpus=False)


def test_both_sides_of_a_broadcast_allocate_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "NCCL_CUMEM_ENABLE"
    monkeypatch.delenv(name, raising=False)
    apart, together = LauncherSettings(num_rollout=1), LauncherSettings(num_rollout=1, colocate=True)
    assert trainer_environment(apart, gpus=True)[name] == "0"
    assert name not in trainer_environment(together, gpus=True)
    assert name not in trainer_environment(apart, gpus=False)
    monkeypatch.setenv(name, "1")
    assert name not in trainer_environment(apart, gpus=True)


def models(tmp_path: Path, *groups: dict[str, int]) -> str:
    """A file of --sglang-config with a model for each group of engines; the first is the trained one."""
    entries = [
        {"name": f"model-{i}", "update_weights": i == 0, "server_groups": [each]} for i, each in enumerate(groups)
    ]
    (tmp_path / "models.yaml").write_text(json.dumps({"sglang": entries}))
    return str(tmp_path / "models.yaml")


def test_the_engines_of_several_models_are_on_one_node(tmp_path: Path) -> None:
    config = models(tmp_path, {"num_gpus": 4, "num_gpus_per_engine": 2}, {"num_gpus": 1})
    placement = plan(8, ranks=3, sglang_config=config)
    assert placement.engines[0].gpus == 5 and placement.rollout["num_gpus"] == 5 and not placement.engine_hosts()
    # Not the GPUs that are left over on two nodes, but a node that has enough.
    placement = plan([4, 4, 5], nodes=2, ranks=3, sglang_config=config)
    assert placement.trainer_nodes == (0, 1) and [share.node for share in placement.engines] == [2]
    with pytest.raises(NotAvailable, match="engines on several nodes .*: they have 5 GPUs together, and the largest"):
        plan([4, 4, 4, 4, 4, 4, 4], ranks=3, nodes=2, sglang_config=config)
    with pytest.raises(InvalidSetting, match="--rollout-num-gpus 5 = 6 GPUs, but the node has 4$"):
        plan(4, sglang_config=config)
    with pytest.raises(InvalidSetting, match="--rollout-num-gpus 5 requires a machine with GPUs"):
        plan(0, sglang_config=config)


def test_embedded_engines_of_several_models_are_on_one_node(tmp_path: Path) -> None:
    config = models(tmp_path, {"num_engines": 2}, {"num_engines": 1})
    for counts, node in ((0, 0), ([0, 0, 0], 1)):
        (share,) = plan(counts, sglang_config=config).engines
        assert (share.node, share.embedded) == (node, 3)


def test_engines_of_several_models_that_fit_on_no_node_are_named(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text("sglang: [{name: policy, server_groups: [{num_gpus: 5}]}]\n")
    with pytest.raises(InvalidSetting) as caught:
        plan([4, 4, 4], sglang_config=str(tmp_path / "models.yaml"))
    words = (
        "requires 1 node with 1 GPU and 5 others on one node for the engines of all models: the 3 nodes have 4, 4, 4"
    )
    assert words in str(caught.value)
