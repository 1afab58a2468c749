"""Sparse attention over packed rows: against a plain form of it, and against transformers sample by sample."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from trainer_float64 import compare_rows, samples_of_lengths
from trainer_tiny import Runner, alone, make_samples, make_settings, write_sparse_model

from slime.converters.files.safetensors_dir import SafetensorsDir
from slime.trainer.backends import attention, sparse_attention
from slime.trainer.backends.attention import attend
from slime.trainer.backends.fsdp.model import load_model
from slime.trainer.backends.sparse_attention import choose, packed_sparse_attention
from slime.trainer.batching.packing import pack
from slime.trainer.batching.runs import Runs
from slime.trainer.checkpoints.checkpoint import TrainerState, save_checkpoint
from slime.types import Sample
from slime.types.errors import NotAvailable

HEADS, WIDTH, VALUES, INDEXERS, CHOSEN = 3, 6, 5, 16, 4
# Samples of a row: shorter, as long as and longer than the keys that a query attends to.
LENGTHS = [3, 9, CHOSEN, 17, 9, 1]


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def plain(tensors: list[Tensor], seen: list[list[int]]) -> Tensor:
    """Attention of each query alone to the best of the keys that it sees."""
    query, key, value, index_query, index_key, weights = tensors
    outputs = []
    for number, keys in enumerate(seen):
        scores = torch.stack([(F.relu(index_query[number] @ index_key[k]) * weights[number]).sum() for k in keys])
        best = torch.tensor(keys)[scores.topk(min(CHOSEN, len(keys))).indices]
        logits = torch.einsum("hd,khd->hk", query[number], key[best]) * WIDTH**-0.5
        outputs.append(torch.einsum("hk,khv->hv", logits.softmax(-1), value[best]))
    return torch.stack(outputs)


def inputs(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(HEADS, WIDTH), (HEADS, WIDTH), (HEADS, VALUES), (INDEXERS, 8), (8,), (INDEXERS,)]
    return [draw(generator, tokens, *shape).requires_grad_() for shape in shapes]


def sparse(tensors: list[Tensor], runs: Runs) -> Tensor:
    query, key, value, *of_indexer = tensors
    found = choose(*of_indexer, runs, CHOSEN)
    return attend(query, key, value, runs, chosen=found)


def compare(tensors: list[Tensor], runs: Runs, seen: list[list[int]]) -> None:
    expected, found = plain(tensors, seen), sparse(tensors, runs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradient = draw(torch.Generator().manual_seed(1), *expected.shape)
    for ours, wanted in zip(
        torch.autograd.grad(found, tensors[:3], gradient),
        torch.autograd.grad(expected, tensors[:3], gradient),
        strict=True,
    ):
        torch.testing.assert_close(ours, wanted, rtol=1e-11, atol=1e-11)


def own_keys(lengths: list[int]) -> list[list[int]]:
    starts = np.cumsum([0, *lengths])
    return [list(range(start, start + i + 1)) for start, length in zip(starts, lengths, strict=False)
            for i in range(length)]  # fmt: skip


@pytest.mark.parametrize("at_once", [None, 40])
def test_every_query_attends_to_the_best_keys_of_its_sample(at_once: int | None, monkeypatch: pytest.MonkeyPatch):
    if at_once is not None:
        # So few that the queries of a run are scored, and attend, in parts.
        monkeypatch.setattr(sparse_attention, "_AT_ONCE", at_once * INDEXERS)
        monkeypatch.setattr(attention, "_CHOOSING", 5)
    compare(inputs(sum(LENGTHS)), Runs.apart(LENGTHS, "cpu"), own_keys(LENGTHS))


def test_responses_choose_among_the_keys_of_a_prompt_that_they_share():
    runs = Runs.sharing([7, 2], [[4, 3], [1, 6]], [8], "cpu")
    starts, prompts = [9, 13, 16, 17], [range(7), range(7), range(7, 9), range(7, 9)]
    seen = own_keys([7, 2])
    for start, length, prompt in zip(starts, [4, 3, 1, 6], prompts, strict=True):
        seen += [[*prompt, *range(start, start + i + 1)] for i in range(length)]
    seen += [list(range(23, 23 + i + 1)) for i in range(8)]
    compare(inputs(31), runs, seen)


def test_gathered_keys_are_chosen_from():
    """A rank of two with the first and the last quarter of a sequence, whose keys both ranks hold."""
    whole = np.array([0, 1, 2, 6, 7, 8, 9, 10, 11, 3, 4, 5])
    runs = Runs.gathered([3, 3], [whole[:3], whole], "cpu")
    tensors = inputs(12)
    held = [tensors[0][:6], *tensors[1:3], tensors[3][:6], tensors[4], tensors[5][:6]]
    seen = [whole[: i + 1].tolist() for i in range(3)] + [whole[: i + 1].tolist() for i in range(9, 12)]
    compare(held, runs, seen)


def test_nothing_is_chosen_where_every_key_is_seen():
    tensors, lengths = inputs(9), [CHOSEN, 2, 3]
    assert choose(*tensors[3:], Runs.apart(lengths, "cpu"), CHOSEN) is None
    compare(tensors, Runs.apart(lengths, "cpu"), own_keys(lengths))


@pytest.mark.parametrize("indexers", [None, ["full", "shared", "full"]], ids=["each", "shared"])
@pytest.mark.parametrize("share_prompts", [False, True])
def test_rows_have_the_logits_and_gradients_of_each_sample_alone(
    tmp_path: Path, indexers: list[str] | None, share_prompts: bool
):
    from transformers import AutoModelForCausalLM

    path = write_sparse_model(tmp_path / "model", **({} if indexers is None else {"indexer_types": indexers}))
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    model = load_model(path, flag="--hf-checkpoint")
    samples = samples_of_lengths(3, 40, 1, 20)
    # Two responses to one prompt.
    samples[3].tokens[:20] = samples[1].tokens[:20]
    compare_rows(model, plain, samples, share_prompts=share_prompts)
    indexers = {name: parameter for name, parameter in model.named_parameters() if ".indexer." in name}
    assert indexers and not any(parameter.requires_grad for parameter in indexers.values())


def test_a_row_in_float64_has_the_log_probs_of_each_sample_alone(tmp_path: Path):
    path = write_sparse_model(tmp_path / "model", first_k_dense_replace=3)
    model = load_model(path, flag="--hf-checkpoint").double()
    samples = samples_of_lengths(3, 40, 1, 20)

    def log_probs(of: list[Sample]) -> Tensor:
        batch = pack(of, range(len(of)), [0.0] * len(of), [1.0] * len(of), share_prompts=False)
        logits = model(batch.tokens, position_ids=batch.position_ids, runs=batch.runs, logits_to_keep=batch.rows).logits
        return logits[0].log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]

    torch.testing.assert_close(log_probs(samples), torch.cat([log_probs([s]) for s in samples]), rtol=0, atol=1e-12)


def test_steps_do_not_depend_on_the_rows_and_leave_the_indexers_as_they_are(tmp_path: Path):
    path = write_sparse_model(tmp_path / "model")
    before = dict(iter(SafetensorsDir(path)))
    metrics: list[dict[str, Any]] = []
    for values in (
        {"max_tokens_per_gpu": 1000},
        {"use_dynamic_batch_size": False, "micro_batch_size": 1},
        {"max_tokens_per_gpu": 40, "gradient_checkpointing": True},
    ):
        runner = Runner(make_settings(path, lr=1e-4, weight_decay=0.1, **values))
        metrics.append(runner.run(0))
        assert metrics[-1]["train/grad_norm"] == pytest.approx(metrics[0]["train/grad_norm"], rel=1e-3)
        assert metrics[-1]["train/entropy_loss"] == pytest.approx(metrics[0]["train/entropy_loss"], rel=1e-4)
        after = runner.weights()
        assert after.keys() == before.keys()
        same = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
        assert {name for name in same if "e_score_correction_bias" not in name} == {
            n for n in before if ".indexer." in n
        }
    state = TrainerState(step=0, updates=0)
    save_checkpoint(tmp_path / "saved", runner.backend, alone(), state, Path(path), optimizer=True)
    saved = SafetensorsDir(tmp_path / "saved")
    for name in before:
        torch.testing.assert_close(saved.load(name), after[name], rtol=0, atol=0, msg=name)


def test_layers_that_rows_cannot_have_are_refused_by_name(tmp_path: Path):
    from transformers import DeepseekV32Config

    path = write_sparse_model(tmp_path / "model")
    layer = load_model(path, flag="--hf-checkpoint").model.layers[0].self_attn
    with pytest.raises(NotAvailable, match="GlmMoeDsaAttention is not told where samples begin"):
        packed_sparse_attention(layer, torch.zeros(1, 3, 32), (torch.zeros(1, 3, 4), torch.zeros(1, 3, 4)))
    DeepseekV32Config().save_pretrained(tmp_path / "other")
    with pytest.raises(NotAvailable, match="layer_types indexed_attention is not supported yet"):
        load_model(str(tmp_path / "other"), flag="--hf-checkpoint")


def test_compiled_layers_train_as_eager_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import functools

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    path = write_sparse_model(tmp_path / "model", num_hidden_layers=2, first_k_dense_replace=2)
    found: list[dict[str, Any]] = []
    with torch.compiler.set_stance("default"):
        for compile in (False, True):
            runner = Runner(make_settings(path, lr=1e-4, max_tokens_per_gpu=64, compile=compile))
            found.append(runner.run(0, make_samples()[:8]))
    assert not runner.backend._compiler.failed  # type: ignore[attr-defined]
    for name in ("train/loss", "train/grad_norm", "train/entropy_loss"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-3, abs=1e-6), name
