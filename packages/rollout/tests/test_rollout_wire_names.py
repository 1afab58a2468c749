"""Names in samples that come from the buffer: code, rewards, template arguments."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from rollout_fakes import FakeBuffer, FakeEngine, prompt_groups

from slime.rollout import service as service_module
from slime.rollout.chat.template import check_arguments, template_arguments
from slime.rollout.service import RolloutService
from slime.rollout.settings.rollout import RolloutSettings
from slime.rollout.sources import leased
from slime.rollout.sources.wire_names import WireNames
from slime.types import Sample, SampleGroup
from slime.types.clients import RolloutClient, Writer
from slime.types.errors import InvalidField, InvalidSetting
from slime.types.rpc import RpcSettings, Server
from slime.v1 import rollout_pb2_grpc

TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}{% if enable_thinking %}<think>{% endif %}"


@pytest.fixture
def serve(make_state, monkeypatch):
    """serve(buffer, engine, **settings): a client of a service over them."""
    opened = []

    def open_service(buffer: FakeBuffer, engine: FakeEngine, **settings):
        monkeypatch.setattr(service_module, "BufferClient", lambda *args, **kwargs: buffer)
        state = make_state(engine, **settings)
        service = RolloutService(RolloutSettings(hf_checkpoint="none", **settings), state, "none")
        add = rollout_pb2_grpc.add_RolloutServiceServicer_to_server
        server = Server([(add, service)], RpcSettings(), service_names=["slime.v1.RolloutService"])
        client = RolloutClient(server.start(), writer=Writer("run", 1))
        opened.append((client, server))
        return client

    yield open_service
    for client, server in opened:
        client.close()
        server.stop(0)


def evil(tmp_path: Path) -> tuple[str, Path]:
    """A plug-in path, and the file that appears when it is imported."""
    marker = tmp_path / "pwned"
    file = tmp_path / "evil.py"
    file.write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "async def generate(args, sample, sampling_params):\n    return sample\n"
        "async def reward(args, sample, **kwargs):\n    return 1.0\n"
    )
    return str(file), marker


@pytest.mark.parametrize(("field", "function"), [("generate_function_path", "generate"), ("custom_rm_path", "reward")])
def test_code_that_the_buffer_names_is_not_imported(engine, serve, tmp_path, field, function):
    path, marker = evil(tmp_path)
    groups = prompt_groups(3, 2)
    setattr(groups[1].samples[1], field, f"{path}:{function}")
    buffer = FakeBuffer(groups)
    client = serve(buffer, engine, n_samples_per_prompt=2)
    assert client.generate(0, 2, timeout=20).metrics["rollout/raw_reward"] == 1.0
    assert sorted(buffer.completed) == [0, 2] and buffer.rejected == [(1, f"unknown {field}")]
    assert not marker.exists()


def test_code_that_an_evaluation_set_of_the_buffer_names_is_not_imported(engine, serve, tmp_path):
    path, marker = evil(tmp_path)
    sets = {"held_out": prompt_groups(2, 1)}
    sets["held_out"][1].samples[0].custom_rm_path = f"{path}:reward"
    with pytest.raises(InvalidField, match="custom_rm_path: got .*evil.py:reward, expected a path that this run"):
        serve(FakeBuffer([], evaluation=sets), engine).evaluate(0, timeout=20)
    assert not marker.exists()


def test_a_path_that_the_run_was_started_with_is_taken_from_the_buffer_too(engine, serve, tmp_path):
    path, marker = evil(tmp_path)
    groups = prompt_groups(1, 1)
    groups[0].samples[0].custom_rm_path = f"{path}:reward"
    buffer = FakeBuffer(groups)
    serve(buffer, engine, eval_overrides={"some": {"custom_rm_path": f"{path}:reward"}}).generate(0, 1, timeout=20)
    assert buffer.completed[0][0].reward == 1.0 and marker.exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"metadata": {"rm_type": "maths"}}, "unknown --rm-type"),
        ({"metadata": {"rm_type": "boxed_" * 5000 + "math"}}, "unknown --rm-type"),
        ({"metadata": {"rm_type": "remote_rm"}}, "unknown metadata"),
        ({"apply_chat_template_kwargs": {"chat_template": "{% for a in range(9) %}{% endfor %}"}},
         "unknown apply_chat_template_kwargs"),
        ({"apply_chat_template_kwargs": {"padding": "max_length", "max_length": 10**9}},
         "unknown apply_chat_template_kwargs"),
    ],
)  # fmt: skip
def test_one_bad_name_costs_its_group_and_not_the_run(engine, serve, change, reason):
    groups = prompt_groups(2, 1)
    for field, value in change.items():
        setattr(groups[0].samples[0], field, value)
    buffer = FakeBuffer(groups)
    serve(buffer, engine).generate(0, 1, timeout=20)
    assert sorted(buffer.completed) == [1] and buffer.rejected == [(0, reason)]


def test_rm_type_is_data_of_the_users_where_a_function_of_theirs_scores_the_sample(engine, serve, tmp_path):
    path, _ = evil(tmp_path)
    groups = prompt_groups(2, 1)
    for group, rm_type in zip(groups, ("my own kind", "remote_rm"), strict=True):
        group.samples[0].metadata = {"rm_type": rm_type}
    buffer = FakeBuffer(groups)
    serve(buffer, engine, custom_rm_path=f"{path}:reward").generate(0, 2, timeout=20)
    assert sorted(buffer.completed) == [0, 1] and not buffer.rejected
    assert buffer.completed[0][0].metadata["rm_type"] == "my own kind"


def test_rm_type_of_an_evaluation_set_is_checked_by_what_scores_that_set():
    overrides = {"mine": {"custom_rm_path": "m.f"}, "built_in": {"rm_type": "math"}}
    sample = Sample(prompt="1>", metadata={"rm_type": "my own kind"})
    for of_training, accepted in (("m.g", {None, "mine", "other"}), (None, {"mine"})):
        settings = RolloutSettings(hf_checkpoint="none", custom_rm_path=of_training, eval_overrides=overrides)
        names = WireNames(settings, SimpleNamespace(chat_template=None))
        for evaluation_set in (None, "mine", "built_in", "other"):
            if evaluation_set in accepted:
                names.check([sample], evaluation_set)
                continue
            with pytest.raises(InvalidSetting, match="unknown reward function 'my own kind'"):
                names.check([sample], evaluation_set)


def test_groups_that_all_name_something_unknown_end_the_rollout_with_what_is_wrong(engine, serve, monkeypatch):
    monkeypatch.setattr(leased, "REFUSED_IN_A_ROW", 3)
    groups = prompt_groups(5, 1)
    for group in groups:
        group.samples[0].metadata = {"rm_type": "intger"}
    buffer = FakeBuffer(groups)
    with pytest.raises(InvalidSetting, match="unknown reward function 'intger'; did you mean integer"):
        serve(buffer, engine).generate(0, 1, timeout=20)
    assert len(buffer.rejected) >= 3 and not buffer.completed


def test_a_path_that_code_of_this_run_set_comes_back_from_the_buffer(tmp_path):
    names = WireNames(RolloutSettings(hf_checkpoint="none"), SimpleNamespace(chat_template=None))
    sample = Sample(prompt="1>", generate_function_path="mine.generate")
    assert names.refusal([sample]) is not None
    buffer = FakeBuffer([SampleGroup(0, "train", [Sample(group_index=0, index=0, prompt="1>")])])
    with leased.LeasedDataSource(buffer, worker_id="w", names=names) as source:
        (group,) = source.get_samples(1)
        group[0].generate_function_path = "mine.generate"
        source.add_samples([group])
        (again,) = source.get_samples(1)
    assert again[0].generate_function_path == "mine.generate" and not buffer.rejected


def test_arguments_of_a_template_are_those_that_it_reads():
    tokenizer = SimpleNamespace(chat_template=TEMPLATE)
    assert template_arguments(tokenizer) == {"enable_thinking"}
    assert check_arguments(tokenizer, {"enable_thinking": False}) == {"enable_thinking": False}
    assert check_arguments(tokenizer, None) == {} == check_arguments(SimpleNamespace(), {})
    for name in ("chat_template", "padding", "max_length", "bos_token", "messages", "tokenize", "thinking"):
        with pytest.raises(InvalidField, match=f"chat_template_kwargs.{name}: .* reads \\(enable_thinking\\)"):
            check_arguments(tokenizer, {name: "x"})
    with pytest.raises(InvalidField, match="chat_template_kwargs: got 3, expected an object"):
        check_arguments(tokenizer, 3)


def test_templates_by_name_with_the_tags_of_transformers_are_read():
    several = {
        "default": "{% generation %}{{ reasoning_effort }}{% endgeneration %}",
        "tool_use": "{% for t in tools %}{% if t %}{% break %}{% endif %}{% endfor %}{{ strftime_now() }}{{ lang }}",
    }
    assert template_arguments(SimpleNamespace(chat_template=several)) == {"reasoning_effort", "lang"}
    assert template_arguments(SimpleNamespace(chat_template="{% nonsense")) == frozenset()
