"""The embedded engine with experts: weights by the names of the model's files, which transformers keeps otherwise."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rollout_tiny_model import write_tiny_model
from safetensors.torch import load_file, save

from slime.rollout.calls.event_loop import LoopThread
from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.embedded.endpoints.generate import make_response
from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.model.checks import WeightChecker
from slime.rollout.engines.embedded.model.loading import Loaded
from slime.rollout.engines.embedded.model.names import disk_tensors
from slime.rollout.engines.embedded.model.padded import token_bytes
from slime.rollout.engines.embedded.model.params import SamplingParams
from slime.rollout.engines.embedded.model.weights import ModelWeights
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.embedded.scheduling.scheduler import Scheduler
from slime.rollout.engines.process import EngineProcess
from slime.rollout.fleet.fleet import Fleet
from slime.rollout.generate.state import flat_args, fleet_options
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.errors import InvalidField, NotAvailable

PROMPT = [2, 3, 4, 41]
SAMPLED = {"temperature": 1.0, "max_new_tokens": 8, "sampling_seed": 5}
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("first"), seed=0, experts=4)


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("second"), seed=1, experts=4)


@pytest.fixture(scope="module")
def engine(first: Path) -> Iterator[EngineProcess]:
    with start_embedded(EmbeddedOptions(model_path=str(first), threads=1)) as process:
        yield process.wait_ready(120)


@pytest.fixture
def call(engine: EngineProcess) -> Any:
    def run(function: Any) -> Any:
        async def inside() -> Any:
            async with EngineClient(engine.url, engine.name) as client:
                return await function(client)

        return asyncio.run(inside())

    return run


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def model_of(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def from_buckets(call: Any, directory: Path) -> None:
    items = list(tensors(directory).items())
    half = len(items) // 2
    call(lambda c: c.update_weights_from_bucket(save(dict(items[half:])), 1, last=False))
    call(lambda c: c.update_weights_from_bucket(save(dict(items[:half])), 1, last=True))


def from_directory(call: Any, directory: Path) -> None:
    call(lambda c: c.update_weights_from_disk(str(directory), 1))


def check_log_probs(call: Any, directory: Path) -> None:
    answer = call(lambda c: c.generate(PROMPT, SAMPLED))
    output = answer["output_ids"]
    with torch.no_grad():
        logits = model_of(directory)(input_ids=torch.tensor([[*PROMPT, *output]])).logits[0]
    wanted = logits[len(PROMPT) - 1 : -1].log_softmax(-1).gather(-1, torch.tensor(output)[:, None])[:, 0]
    given = [log_prob for log_prob, _, _ in answer["meta_info"]["output_token_logprobs"]]
    assert given == pytest.approx(wanted.tolist(), abs=1e-5)


@pytest.mark.parametrize("update", [from_buckets, from_directory])
def test_log_probs_are_those_of_the_weights_that_came(
    call: Any, first: Path, second: Path, update: Callable[[Any, Path], None]
) -> None:
    from_directory(call, first)
    check_log_probs(call, first)
    update(call, second)
    check_log_probs(call, second)


def test_an_expert_of_another_shape_or_number_is_refused_by_its_name(call: Any, second: Path) -> None:
    sent = tensors(second)
    beyond = EXPERT.replace("experts.2", "experts.4")
    for change, name, words in (
        ({EXPERT: sent[EXPERT].T}, EXPERT, r"shape \[16, 32\]"),
        ({beyond: sent[EXPERT].clone()}, beyond, "the name of a tensor"),
        ({EXPERT: None}, EXPERT, "missing"),
    ):
        bucket = {key: value.contiguous() for key, value in (sent | change).items() if value is not None}
        with pytest.raises(InvalidField, match=words) as refused:
            call(lambda c, bucket=bucket: c.update_weights_from_bucket(save(bucket), 9, last=True))
        assert refused.value.field == name


def test_checksums_are_of_the_tensors_of_the_files(call: Any, first: Path, second: Path) -> None:
    from_directory(call, second)
    (rank,) = call(lambda c: c.check_weights())["ranks"]
    assert rank["checksums"].keys() - {"lm_head.weight"} == tensors(second).keys()
    call(lambda c: c.check_weights("reset_tensors"))
    from_buckets(call, second)
    assert call(lambda c: c.check_weights())["ranks"] == [rank]
    call(lambda c: c.check_weights("snapshot"))
    changed = tensors(second) | {EXPERT: tensors(first)[EXPERT]}
    call(lambda c: c.update_weights_from_bucket(save(changed), 2, last=True))
    with pytest.raises(InvalidField) as different:
        call(lambda c: c.check_weights("compare"))
    assert different.value.field == EXPERT and "0 others" in str(different.value.value)


def test_weights_come_in_another_type(first: Path, second: Path) -> None:
    model = model_of(first)
    weights = ModelWeights(model, "0")
    halved = {name: tensor.bfloat16() for name, tensor in tensors(second).items()}
    weights.load_bucket(save(halved), "1", last=True)
    assert all(torch.equal(weights.tensors[name], tensor.float()) for name, tensor in halved.items())
    fused = model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(fused[2, 16:], halved[EXPERT].float())
    assert WeightChecker(weights).run("checksum")["success"] is True


OTHERS = {
    "deepseek_v3": "mlp.experts.3.down_proj", "glm4_moe": "mlp.experts.3.down_proj",
    "glm_moe_dsa": "mlp.experts.3.down_proj", "minimax_m2": "block_sparse_moe.experts.3.w2",
}  # fmt: skip


def write_other(kind: str, directory: Path) -> Path:
    """A random model of another family, whose routers have biases."""
    from transformers import AutoConfig, AutoModelForCausalLM

    # A model whose queries attend to three keys.
    sparse = {"index_topk": 3, "index_n_heads": 16, "index_head_dim": 16} if kind == "glm_moe_dsa" else {}
    config = AutoConfig.for_model(
        kind, **sparse,
        vocab_size=32, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2, n_group=1,
        n_routed_experts=4, topk_group=1, first_k_dense_replace=1, head_dim=8, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, max_position_embeddings=64, pad_token_id=0,
        eos_token_id=1, bos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, tensor in model.state_dict().items():
        if "e_score_correction_bias" in name:
            tensor += 0.1 * torch.randn_like(tensor)
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("kind", OTHERS)
def test_other_families_have_the_names_of_their_files(kind: str, tmp_path: Path) -> None:
    given, files = disk_tensors(model_of(write_other(kind, tmp_path))), tensors(tmp_path)
    assert given.keys() == files.keys() and f"model.layers.1.{OTHERS[kind]}.weight" in files
    assert all(torch.equal(given[name], tensor) for name, tensor in files.items())


@pytest.mark.parametrize("kind", OTHERS)
def test_other_families_write_what_transformers_does(kind: str, tmp_path: Path) -> None:
    model = model_of(write_other(kind, tmp_path)).requires_grad_(False)
    if kind in ("deepseek_v3", "glm_moe_dsa"):
        # Two layers in float32: the compressed vector, its rotated part, and what the indexer keeps.
        assert token_bytes(model) == 2 * 4 * (16 + 8 + 16 * (kind == "glm_moe_dsa"))
    loaded = Loaded(model, None, 32, 64, frozenset([1]))
    scheduler = Scheduler(loaded, EmbeddedOptions(model_path=".", random_seed=0))
    params = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
    prompts = ([2, 3, 4, 5], [6], [2, 3, 4, 5])
    responses = [make_response(loaded, prompt, params, "", "input_ids") for prompt in prompts]
    try:
        scheduler.submit(responses).done.result(timeout=60)
    finally:
        scheduler.stop()
    for prompt, response in zip(prompts, responses, strict=True):
        tokens = torch.tensor([[*prompt, *response.output_ids]])
        best = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1).max(-1)
        assert list(response.output_ids) == best.indices.tolist()
        assert list(response.log_probs) == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_model_whose_files_have_no_part_of_a_tensor_is_refused_when_it_starts(
    first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import core_model_loading

    model = model_of(first)
    revert = core_model_loading.revert_weight_conversion
    name = "model.norm.weight"
    for change, named in (
        (lambda found: found | {name: found[name] * 2}, name),
        (lambda found: {key: found[key] for key in found if key != EXPERT}, "model.layers.1.mlp.experts"),
    ):
        monkeypatch.setattr(
            core_model_loading, "revert_weight_conversion", lambda m, own, change=change: change(revert(m, own))
        )
        with pytest.raises(NotAvailable, match=named) as refused:
            ModelWeights(model, "0")
        assert refused.value.field == "--model-path"


def experts_of(directory: Path, tokens: list[int]) -> np.ndarray:
    """[tokens - 1, layers, 2] sorted: those with the largest scores, of each token that is fed."""
    with torch.no_grad():
        output = model_of(directory)(input_ids=torch.tensor([tokens[:-1]]), output_router_logits=True)
    return np.stack([np.sort(layer.topk(2, -1).indices.numpy(), -1) for layer in output.router_logits], 1)


def decoded(meta: dict[str, Any], rows: int) -> np.ndarray:
    flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4")
    return np.sort(flat.reshape(rows, 2, 2), -1)


def test_answers_tell_which_experts_each_token_was_sent_to(first: Path) -> None:
    options = EmbeddedOptions(model_path=str(first), threads=1, enable_return_routed_experts=True)
    prompts = [PROMPT, PROMPT, [5, 6]]
    lengths = [8, 3, 6]
    params = [SAMPLED | {"max_new_tokens": n, "sampling_seed": i, "ignore_eos": True} for i, n in enumerate(lengths)]

    async def ask(engine: EngineProcess) -> Any:
        async with EngineClient(engine.url, engine.name) as client:
            answers = await client.generate(prompts, params, return_routed_experts=True)
            without, info = await client.generate(PROMPT, SAMPLED), await client.server_info()
            await client.pause("in_place")
            ended = asyncio.ensure_future(client.generate(prompts, params, return_routed_experts=True))
            while not ended.done():
                await client.abort()
            return answers, without, info, await ended

    with start_embedded(options) as process:
        answers, without, info, ended = asyncio.run(ask(process.wait_ready(120)))
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = [*prompt, *answer["output_ids"]]
        found = decoded(answer["meta_info"], len(tokens) - 1)
        assert found.tolist() == experts_of(first, tokens).tolist()
    assert "routed_experts" not in without["meta_info"]
    assert info["enable_return_routed_experts"] is True
    # They were aborted before they ran.
    assert [(a["output_ids"], "routed_experts" in a["meta_info"]) for a in ended] == [([], False)] * 3


def test_an_engine_that_records_no_experts_refuses_to_return_them(call: Any) -> None:
    with pytest.raises(InvalidField, match="enable-return-routed-experts"):
        call(lambda c: c.generate(PROMPT, SAMPLED, return_routed_experts=True))


@pytest.mark.parametrize("of_megatron", [(None, None), (7, 3)])
def test_args_tell_the_shape_of_the_experts_of_the_engines(first: Path, of_megatron: tuple[Any, Any]) -> None:
    """Megatron's flags are part of every run: --moe-router-topk has a default."""
    settings = RolloutSettings(hf_checkpoint=str(first), use_rollout_routing_replay=True, rm_type="random")
    fleet = Fleet([], LoopThread(), fleet_options(settings))
    args = flat_args(settings, fleet, dict(zip(("num_layers", "moe_router_topk"), of_megatron, strict=True)))
    fleet.loop.stop()
    assert (args.num_layers, args.moe_router_topk) == (2, 2)
