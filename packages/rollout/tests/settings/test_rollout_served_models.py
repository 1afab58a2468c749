"""The file of --sglang-config: the models of a run, their groups of engines, and what is wrong with others."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.rollout.settings.model_file import GROUP_KEYS, MODEL_KEYS, read_models
from slime.rollout.settings.rollout import RolloutSettings
from slime.rollout.settings.served_models import group_settings
from slime.types.errors import ConfigError, InvalidFile, InvalidSetting, MissingFile, NotAvailable, UnknownFlag
from slime.types.settings import build

POLICY: dict[str, Any] = {"name": "policy", "server_groups": [{"num_gpus": 4, "num_gpus_per_engine": 2}]}
JUDGE: dict[str, Any] = {
    "name": "judge",
    "model_path": "/models/judge",
    "num_gpus_per_engine": 1,
    "server_groups": [{"worker_type": "regular", "num_gpus": 2, "overrides": {"mem-fraction-static": 0.8}}],
}
EMBEDDED: list[dict[str, Any]] = [
    {"name": "policy", "server_groups": [{"num_engines": 2}]},
    {"name": "judge", "model_path": "/models/judge", "server_groups": [{"num_engines": 1}]},
]


def settings(tmp_path: Path, models: Any, **values: Any) -> RolloutSettings:
    path = tmp_path / "models.yaml"
    path.write_text(json.dumps({"sglang": models}))
    return RolloutSettings(hf_checkpoint="/models/policy", sglang_config=str(path), **values)


def test_models_have_their_own_engines_and_settings(tmp_path: Path) -> None:
    made = settings(
        tmp_path, [POLICY, JUDGE], offload_rollout=True, update_weight_mode="delta", use_rollout_routing_replay=True,
        sglang_args={"context_length": 4096}, rollout_num_gpus_per_engine=2,
    )  # fmt: skip
    policy, judge = made.served_models
    assert (policy.name, policy.path, policy.trained) == ("policy", "/models/policy", True)
    assert (judge.name, judge.path, judge.trained) == ("judge", "/models/judge", False)
    # The sum over the file, as placement needs it.
    assert made.rollout_num_gpus == 6
    of_policy = group_settings(made, policy, policy.groups[0])
    assert of_policy.hf_checkpoint == "/models/policy" and of_policy.rollout_num_gpus_per_engine == 2
    assert of_policy.offloads and of_policy.update_weight_mode == "delta" and of_policy.use_rollout_routing_replay
    assert of_policy.sglang_args == {"context_length": 4096} and of_policy.served_models == ()
    of_judge = group_settings(made, judge, judge.groups[0])
    assert of_judge.hf_checkpoint == "/models/judge" and of_judge.rollout_num_gpus_per_engine == 1
    assert of_judge.sglang_args == {"context_length": 4096, "mem_fraction_static": 0.8}
    # Its engines keep their weights and their memory.
    assert not of_judge.offloads and of_judge.update_weight_mode == "full" and not of_judge.use_rollout_routing_replay


def test_services_on_other_nodes_need_no_file(tmp_path: Path) -> None:
    made = settings(tmp_path, EMBEDDED)
    (tmp_path / "models.yaml").unlink()
    assert pickle.loads(pickle.dumps(made)).served_models == made.served_models


def test_embedded_engines_are_counted(tmp_path: Path) -> None:
    made = settings(tmp_path, EMBEDDED)
    assert made.rollout_engine == "embedded" and made.rollout_num_engines == 3 and made.rollout_num_gpus is None
    counts = [group_settings(made, model, group).rollout_num_engines for model in made.served_models
              for group in model.groups]  # fmt: skip
    assert counts == [2, 1]


def test_a_path_to_the_trained_model_is_the_trained_model(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/models/policy")
    models = [POLICY | {"model_path": str(tmp_path / "link")}, JUDGE]
    assert settings(tmp_path, models).served_models[0].trained
    # Its first weights stay available where that is asked for.
    initial = {"name": "initial", "update_weights": False, "server_groups": [{"num_gpus": 1}]}
    made = settings(tmp_path, [POLICY, initial])
    assert [model.trained for model in made.served_models] == [True, False]
    assert made.served_models[1].path == "/models/policy"


PAIR = [{"worker_type": "prefill", "num_gpus": 2}, {"worker_type": "decode", "num_gpus": 4, "num_gpus_per_engine": 2}]


def test_engines_of_a_model_may_be_pairs(tmp_path: Path) -> None:
    made = settings(tmp_path, [POLICY | {"server_groups": PAIR}, JUDGE])
    assert [group.worker_type for group in made.served_models[0].groups] == ["prefill", "decode"]
    assert made.rollout_num_gpus == 8
    # The judge's engines answer nobody who needs nuclei or experts.
    settings(tmp_path, [POLICY, JUDGE | {"server_groups": PAIR}], rollout_top_k=50, use_rollout_routing_replay=True)


@pytest.mark.parametrize(
    "values, flag",
    [
        ({"rollout_top_k": 50}, "--rollout-top-k"),
        ({"rollout_top_p": 0.9}, "--rollout-top-p"),
        ({"use_rollout_routing_replay": True}, "--use-rollout-routing-replay"),
        ({"deterministic": True}, "--deterministic"),
    ],
)
def test_pairs_refuse_what_they_cannot_tell(tmp_path: Path, values: dict[str, Any], flag: str) -> None:
    match = f"{flag} and --sglang-config .*models.yaml: .*worker_type prefill cannot be used together"
    with pytest.raises(InvalidSetting, match=match):
        settings(tmp_path, [POLICY | {"server_groups": PAIR}], **values)


def test_overrides_are_held_to_what_the_kind_checks_before_it_is_chosen(tmp_path: Path) -> None:
    group = {"num_gpus": 1, "overrides": {"speculative_algorithm": "EAGLE"}}
    match = r"server_groups\[0\]: --rollout-top-k 50 and --sglang-speculative-algorithm cannot be used together"
    with pytest.raises(InvalidSetting, match=match):
        settings(tmp_path, [POLICY | {"server_groups": [group]}], rollout_top_k=50)
    settings(tmp_path, [POLICY, JUDGE | {"server_groups": [group]}], rollout_top_k=50)


def test_embedded_engines_are_no_pairs(tmp_path: Path) -> None:
    pair = [{"worker_type": "prefill", "num_engines": 1}, {"worker_type": "decode", "num_engines": 1}]
    with pytest.raises(NotAvailable, match="worker_type prefill is not supported yet: the embedded engine does all"):
        settings(tmp_path, [{"name": "policy", "server_groups": pair}])


def test_the_number_of_engines_that_do_prefill_is_the_short_form(tmp_path: Path) -> None:
    made = RolloutSettings(hf_checkpoint="m", prefill_num_servers=2, rollout_num_gpus=10, rollout_num_gpus_per_engine=2)
    (model,) = made.served_models
    assert model.trained and model.path == "m"
    shown = [(group.worker_type, group.num_gpus, group.num_gpus_per_engine) for group in model.groups]
    assert shown == [("prefill", 4, 2), ("decode", 6, 2)]


@pytest.mark.parametrize(
    "values, message",
    [
        ({}, "--prefill-num-servers 2 requires --rollout-num-gpus N, a multiple of 1 and at least 3"),
        ({"rollout_num_gpus": 2}, "--prefill-num-servers 2 requires --rollout-num-gpus N"),
        ({"rollout_num_gpus": 7, "rollout_num_gpus_per_engine": 2}, "a multiple of 2 and at least 6"),
        ({"rollout_num_gpus": 4, "rollout_external_engine_addrs": ["h:1"]}, "--prefill-num-servers and --rollout-ext"),
        ({"rollout_num_gpus": 4, "rollout_engine": "embedded"}, 
         "--rollout-engine embedded and --prefill-num-servers 2 cannot be used together: the embedded engine does all"),
        ({"rollout_num_gpus": 4, "sglang_config": "x"}, "--prefill-num-servers and --sglang-config cannot be used"),
        ({"rollout_num_gpus": 4, "deterministic": True}, "--deterministic and --prefill-num-servers 2 cannot be used"),
        ({"rollout_num_gpus": 4, "rollout_top_p": 0.9}, "--rollout-top-p and --prefill-num-servers 2 cannot be used"),
        ({"rollout_num_gpus": 4, "rollout_top_k": 50}, "--rollout-top-k and --prefill-num-servers 2 cannot be used"),
    ],
)  # fmt: skip
def test_the_short_form_needs_gpus_of_its_own(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        RolloutSettings(hf_checkpoint="m", prefill_num_servers=2, **values)
    assert message in caught.value.message


@pytest.mark.parametrize("backend, offload", [(None, None), ("mooncake", True), ("nixl", False)])
def test_pairs_share_the_gpus_of_the_trainer(tmp_path: Path, backend: str | None, offload: bool | None) -> None:
    args = {} if backend is None else {"disaggregation_transfer_backend": backend}
    shared = {"colocate": True, "offload_rollout": offload, "rollout_num_gpus": 4}
    short = RolloutSettings(hf_checkpoint="m", prefill_num_servers=1, sglang_args=args, **shared)
    assert [group.num_gpus for group in short.served_models[0].groups] == [1, 3]
    pair = [group | {"overrides": args} for group in PAIR]
    in_file = settings(tmp_path, [{"name": "policy", "server_groups": pair}], colocate=True, offload_rollout=offload)
    assert in_file.offloads is short.offloads is (offload is not False)


@pytest.mark.parametrize("flag, offload", [("--colocate", None), ("--offload-rollout", True)])
def test_memory_that_nixl_has_registered_is_not_released(tmp_path: Path, flag: str, offload: bool | None) -> None:
    args, shared = {"disaggregation_transfer_backend": "nixl"}, {"colocate": True, "offload_rollout": offload}
    with pytest.raises(InvalidSetting, match=f"{flag} and disaggregation_transfer_backend nixl in --prefill-num-serv"):
        RolloutSettings(hf_checkpoint="m", prefill_num_servers=1, rollout_num_gpus=2, sglang_args=args, **shared)
    # By the file, one engine may have another backend than the other.
    groups = [PAIR[0], PAIR[1] | {"overrides": args}]
    with pytest.raises(InvalidSetting, match=r"nixl in --sglang-config .*groups\[1\].*give --no-offload-rollout"):
        settings(tmp_path, [{"name": "policy", "server_groups": groups}], **shared)


def test_both_engines_of_a_pair_hand_over_by_one_backend(tmp_path: Path) -> None:
    groups = [PAIR[0] | {"overrides": {"disaggregation_transfer_backend": "nixl"}}, PAIR[1]]
    message = r"groups\[1\]\.overrides\.\w+_backend must be that of .*groups\[0\], nixl, got 'mooncake, the default'"
    with pytest.raises(InvalidSetting, match=message):
        settings(tmp_path, [{"name": "policy", "server_groups": groups}])


def test_pairs_beside_the_trainer_ask_for_gpus_of_the_trainer() -> None:
    with pytest.raises(InvalidSetting, match="1 requires --actor-num-gpus-per-node N, a multiple of 1 and at least 2"):
        RolloutSettings(hf_checkpoint="m", prefill_num_servers=1, rollout_num_gpus=1, colocate=True)


def without(entry: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != key}


def judge_with(**group: Any) -> list[Any]:
    return [POLICY, JUDGE | {"server_groups": [group]}]


@pytest.mark.parametrize(
    "models, error, message",
    [
        ([], InvalidFile, "sglang must be a list of models, got []"),
        ("x", InvalidFile, "sglang must be a list of models"),
        (["x"], InvalidFile, "sglang[0] must be a mapping, got 'x'"),
        ([without(POLICY, "name")], InvalidFile, "sglang[0].name must be a name of letters"),
        ([POLICY, JUDGE | {"name": "a/b"}], InvalidFile, "sglang[1].name must be a name of letters"),
        ([POLICY, JUDGE | {"name": "policy"}], InvalidFile, "sglang[1].name must be a name that no other model has"),
        ([POLICY, JUDGE | {"name": "default"}], InvalidFile, "sglang[1].name must be another name"),
        ([POLICY, JUDGE | {"model": "x"}], InvalidFile, "sglang[1]: unknown key 'model'; did you mean"),
        ([POLICY, JUDGE | {"model_path": 3}], InvalidFile, "sglang[1].model_path must be the directory of a model"),
        ([POLICY, JUDGE | {"update_weights": 1}], InvalidFile, "sglang[1].update_weights must be true or false"),
        ([POLICY, JUDGE | {"update_weights": True}], InvalidFile, "sglang[1].model_path must be --hf-checkpoint"),
        ([JUDGE], InvalidFile, "the weights of the trainer go to one model, and here to no model"),
        ([POLICY, POLICY | {"name": "b"}], InvalidFile, "here to the models policy and b"),
        ([without(POLICY, "server_groups")], InvalidFile, "sglang[0].server_groups must be a list of groups"),
        ([POLICY | {"engine_groups": []}], InvalidFile, "sglang[0].engine_groups and server_groups cannot be"),
        (judge_with(num_gpu=2), InvalidFile, "sglang[1].server_groups[0]: unknown key 'num_gpu'; did you mean"),
        (judge_with(), InvalidFile, "sglang[1].server_groups[0] must be a group with num_gpus"),
        (judge_with(num_gpus=1, num_engines=1), InvalidFile, "must be a group with num_gpus, or for embedded"),
        (judge_with(num_gpus=0), InvalidFile, "server_groups[0].num_gpus must be a whole number of at least 1, got 0"),
        (judge_with(num_gpus=True), InvalidFile, "server_groups[0].num_gpus must be a whole number of at least 1"),
        (judge_with(num_gpus=3, num_gpus_per_engine=2), InvalidFile, "must be a multiple of num_gpus_per_engine 2"),
        (judge_with(num_engines=1), InvalidFile, "some groups have num_gpus and others num_engines"),
        (judge_with(num_engines=1, num_gpus_per_engine=1), InvalidFile, "num_gpus_per_engine must be left out"),
        (judge_with(num_gpus=1, worker_type="regula"), InvalidFile, "worker_type must be one of regular, prefill, dec"),
        (judge_with(num_gpus=1, worker_type="prefill"), InvalidFile,
         "sglang[1].server_groups must be regular ones, or prefill and decode ones, got ['prefill']"),
        ([POLICY | {"server_groups": [{"num_gpus": 1}, *PAIR]}], InvalidFile,
         "sglang[0].server_groups must be regular ones, or prefill and decode ones"),
        (judge_with(num_gpus=1, worker_type="encoder"), NotAvailable, "worker_type encoder is not supported yet"),
        (judge_with(num_gpus=1, worker_type="placeholder"), NotAvailable, "placeholder is not supported yet"),
        (judge_with(num_gpus=1, overrides=3), InvalidFile, "server_groups[0].overrides must be a mapping"),
        (judge_with(num_gpus=1, overrides={"mem_fraction_statik": 1}), UnknownFlag,
         "did you mean mem_fraction_static?"),
        (judge_with(num_gpus=1, overrides={"zzz": 1}), UnknownFlag, "sglang[1].server_groups[0].overrides: unknown "),
        (judge_with(num_gpus=1, overrides={"mem-fraction-static": "lots"}), InvalidSetting,
         "sglang[1].server_groups[0].overrides.mem-fraction-static must be a number, got 'lots'"),
        (judge_with(num_gpus=1, overrides={"port": 1}), InvalidSetting,
         "sglang[1].server_groups[0].overrides.port cannot be set"),
        (judge_with(num_gpus=1, overrides=False), InvalidFile, "server_groups[0].overrides must be a mapping, got Fal"),
        (judge_with(num_gpus=1, overrides=[]), InvalidFile, "server_groups[0].overrides must be a mapping, got []"),
        (judge_with(num_gpus=1, worker_type=["regular"]), InvalidFile, "worker_type must be one of regular, prefill"),
        (judge_with(num_gpus=1, worker_type={"a": 1}), InvalidFile, "worker_type must be one of regular, prefill"),
        (judge_with(num_gpus=10**12), InvalidFile, "server_groups[0].num_gpus must be at most 1000000, got 100000000"),
        (judge_with(num_engines=10**12), InvalidFile, "server_groups[0].num_engines must be at most 10000, got 10000"),
        ([EMBEDDED[0], EMBEDDED[1] | {"server_groups": [{"num_engines": 10000}]}], InvalidFile,
         "num_engines must be at most 10000 in all groups together, got 10002"),
        ([POLICY, JUDGE | {"model_path": "a\0b"}], InvalidFile, "sglang[1].model_path must be the directory of a mod"),
        ([POLICY, JUDGE | {"name": "x" * 101}], InvalidFile, "sglang[1].name must be a name of at most 100 characters"),
        ([POLICY, JUDGE | {"name": ["x"]}], InvalidFile, "sglang[1].name must be a name of letters"),
        (judge_with(num_gpus=1, overrides={"tensor-parallel-size": 2}), InvalidSetting,
         "overrides.tensor-parallel-size cannot be set, because the run sets it: give num_gpus_per_engine of the"),
        (judge_with(num_gpus=1, overrides={"model_path": "x"}), InvalidSetting,
         "overrides.model_path cannot be set, because the run sets it: give model_path of the model"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place(
    tmp_path: Path, models: Any, error: type[ConfigError], message: str
) -> None:
    with pytest.raises(error) as caught:
        settings(tmp_path, models)
    assert str(tmp_path / "models.yaml") in caught.value.message and message in caught.value.message


@pytest.mark.parametrize(
    "values, message",
    [
        ({"rollout_num_gpus": 5}, "--rollout-num-gpus must be 6, the sum over --sglang-config"),
        ({"rollout_external_engine_addrs": ["h:1"]}, "--sglang-config and --rollout-external-engine-addrs cannot"),
        ({"colocate": True}, "--sglang-config and --colocate cannot be used together: a trainer shares its GPUs"),
        ({"rollout_engine": "embedded"}, "--rollout-engine embedded requires num_engines in --sglang-config"),
    ],
)
def test_flags_that_contradict_the_file_are_named(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        settings(tmp_path, [POLICY, JUDGE], **values)
    assert message in caught.value.message


@pytest.mark.parametrize(
    "models, values, message",
    [
        (EMBEDDED, {"rollout_num_engines": 2}, "--rollout-num-engines must be 3, the sum over --sglang-config"),
        (EMBEDDED, {"rollout_engine": "sglang"}, "--rollout-engine sglang requires num_gpus in --sglang-config"),
        ([EMBEDDED[0] | {"server_groups": [{"num_engines": 1, "overrides": {"mem_fraction_static": 0.5}}]}], {},
         "sglang[0].server_groups[0]: --rollout-engine embedded and --sglang-mem-fraction-static cannot"),
    ],
)  # fmt: skip
def test_embedded_engines_take_what_they_read(
    tmp_path: Path, models: Any, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidSetting) as caught:
        settings(tmp_path, models, **values)
    assert message in caught.value.message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match="--sglang-config"):
        RolloutSettings(hf_checkpoint="m", sglang_config=str(tmp_path / "none.yaml"))
    (tmp_path / "models.yaml").write_text("sglang: [\n")
    with pytest.raises(InvalidFile, match="--sglang-config"):
        RolloutSettings(hf_checkpoint="m", sglang_config=str(tmp_path / "models.yaml"))
    (tmp_path / "models.yaml").write_text("models: []\n")
    with pytest.raises(InvalidFile, match="unknown key 'models'"):
        RolloutSettings(hf_checkpoint="m", sglang_config=str(tmp_path / "models.yaml"))
    (tmp_path / "models.yaml").write_text("- name: policy\n")
    with pytest.raises(InvalidFile, match="must be a mapping with the key sglang, a list of models, got "):
        RolloutSettings(hf_checkpoint="m", sglang_config=str(tmp_path / "models.yaml"))
    with pytest.raises(InvalidSetting, match="--sglang-config must be a file of models, got ''"):
        RolloutSettings(hf_checkpoint="m", sglang_config="")


def test_a_few_aliases_that_stand_for_a_large_value_are_refused_at_once(tmp_path: Path) -> None:
    lists = ["&a0 [x, x, x, x, x, x, x, x, x]", *(f"&a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))]
    (tmp_path / "models.yaml").write_text(f"sglang:\n- server_groups: [{', '.join(lists)}]\n  name: *a11\n")
    with pytest.raises(InvalidFile, match="name must be a name of letters.*, got ") as caught:
        RolloutSettings(hf_checkpoint="m", sglang_config=str(tmp_path / "models.yaml"))
    assert len(caught.value.message) < 500


def test_the_number_of_engines_has_a_bound() -> None:
    with pytest.raises(InvalidSetting, match="--rollout-num-engines must be .*10000, got 1000000000000"):
        build(RolloutSettings, {"hf_checkpoint": "m", "rollout_num_engines": 10**12})


def test_a_reward_url_may_name_a_model_of_the_run(tmp_path: Path) -> None:
    assert settings(tmp_path, EMBEDDED, rm_url="model://judge/v1/score").rm_url == "model://judge/v1/score"
    with pytest.raises(InvalidSetting, match="unknown model of --sglang-config 'jugde'; did you mean judge"):
        settings(tmp_path, EMBEDDED, rm_url="model://jugde/generate")
    # The trained model, whatever its name; a scheme has no case.
    settings(tmp_path, EMBEDDED, rm_url="model://default/generate")
    with pytest.raises(InvalidSetting, match="unknown model of --sglang-config 'nobody'"):
        settings(tmp_path, EMBEDDED, rm_url="MODEL://nobody/generate")
    for broken in ("model://[judge/generate", "http://[x"):
        with pytest.raises(InvalidSetting, match="--rm-url must be a URL"):
            settings(tmp_path, EMBEDDED, rm_url=broken)
    for dropped in ("model://judge?x=1", "model://judge/generate?x=1", "model://judge/generate#x"):
        with pytest.raises(
            InvalidSetting, match=r"--rm-url must be model://NAME/PATH without \? and #, got 'model://j"
        ):
            settings(tmp_path, EMBEDDED, rm_url=dropped)
    with pytest.raises(InvalidSetting, match="--rm-url model://judge requires --sglang-config FILE"):
        RolloutSettings(hf_checkpoint="m", rm_url="model://judge")


def test_a_reward_that_posts_needs_a_whole_address() -> None:
    for url in ("judge:80", "judge:80/score", "http://", "ftp://judge/score", "/score"):
        with pytest.raises(InvalidSetting, match="--rm-url must be http://HOST:PORT/PATH, .*--rm-type remote_rm posts"):
            RolloutSettings(hf_checkpoint="m", rm_type="remote_rm", rm_url=url)
        # A function of the user's reads it as it likes.
        assert RolloutSettings(hf_checkpoint="m", custom_rm_path="a.b", rm_url=url).rm_url == url
    for url in ("http://judge", "https://judge:80/score?x=1", "HTTP://[::1]:80"):
        assert RolloutSettings(hf_checkpoint="m", rm_type="remote_rm", rm_url=url).rm_url == url


KEYS = ("name", "sglang", "engine_groups", *MODEL_KEYS, *GROUP_KEYS)
TEXT = st.text(max_size=8)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 4) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(models=VALUES)
def test_any_content_is_read_or_refused_by_name(tmp_path_factory: pytest.TempPathFactory, models: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(json.dumps({"sglang": models}, ensure_ascii=False), encoding="utf-8")
    try:
        read = read_models(str(path), "/models/policy", 1)
    except ConfigError as error:
        assert str(path) in error.message
    else:
        assert sum(model.trained for model in read) == 1
