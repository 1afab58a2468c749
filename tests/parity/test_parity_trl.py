"""Loss, gradients and advantages of our trainer on both backends against trainers of TRL, on the same samples.

TRL is installed into an environment of its own, which sees the torch and the transformers of this one. Not compared,
since only one side has them: luspo, sapo and vespo, entropy masks (TRL); k1, k2, low_var_kl, REINFORCE++, trajectories
of several samples (ours).
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import uv
from safetensors.torch import load_file

from parity_cases import CASES, MAX_LENGTH, REDUCER, REDUCER_SOURCE
from slime.trainer.backends.build import build_backend
from slime.trainer.batching.plan import Planner
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.step.step import TrainStep
from slime.types import Sample

VOCAB, GROUPS, GROUP_SIZE = 32, 4, 4
# TRL, and what it needs besides torch, transformers and what these bring.
REQUIREMENTS = (
    "trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0", "pandas==3.1.1", "dill==0.4.1", "multiprocess==0.70.19",
    "xxhash==4.1.0", "pyarrow==26.0.1", "python-dateutil==2.9.0.post0", "six==1.17.0", "psutil==7.2.2",
)  # fmt: skip


def write_models(directory: Path) -> None:
    """The policy, the weights that made the samples, and a reference; each a Qwen3 of a few thousand parameters."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False,
        initializer_range=0.3, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    ))  # fmt: skip
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1", unk_token="t0")
    policy = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for kind, noise in (("policy", 0.0), ("old", 0.01), ("reference", 0.03)):
        model.load_state_dict({name: t + noise * torch.randn_like(t) for name, t in policy.items()})
        model.save_pretrained(directory / kind)
        tokenizer.save_pretrained(directory / kind)


def make_samples(directory: Path) -> list[Sample]:
    """Zeros inside masks, responses of one token, and a last group whose rewards are equal."""
    from transformers import AutoModelForCausalLM

    old = AutoModelForCausalLM.from_pretrained(directory / "old", dtype=torch.float64)
    random, samples = np.random.default_rng(0), list[Sample]()
    for group in range(GROUPS):
        prompt = random.integers(2, VOCAB, 3 + group)
        for member in range(GROUP_SIZE):
            length = 1 if member == 1 else int(random.integers(3, MAX_LENGTH + 1))
            tokens = np.concatenate([prompt, random.integers(2, VOCAB, length)]).astype(np.int32)
            mask = np.ones(length, np.uint8)
            mask[1 : 1 + member % 2 + member // 2] = length == 1
            with torch.no_grad():
                logits = old(input_ids=torch.tensor(tokens, dtype=torch.int64)[None]).logits[0]
            log_probs = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(tokens[1:], dtype=torch.int64)[:, None])
            samples.append(Sample(
                index=len(samples), group_index=group, tokens=tokens, response_length=length, loss_mask=mask,
                reward=1.0 if group == GROUPS - 1 else float(random.integers(0, 4)),
                rollout_log_probs=log_probs[-length:, 0].to(torch.float32).numpy(),
            ))  # fmt: skip
    return samples


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("parity")
    write_models(path)
    (path / "reducer.py").write_text(REDUCER_SOURCE)
    return path


@pytest.fixture(scope="module")
def samples(directory: Path) -> list[Sample]:
    return make_samples(directory)


@pytest.fixture(scope="module")
def trl(directory: Path, samples: list[Sample]) -> dict[str, dict[str, torch.Tensor]]:
    """By case what TRL computed."""
    job = {
        "group_size": GROUP_SIZE,
        "max_length": MAX_LENGTH,
        "cases": {name: dataclasses.asdict(case) for name, case in CASES.items()},
        "samples": [
            {
                "prompt": s.tokens[: -s.response_length], "response": s.tokens[-s.response_length :],
                "mask": s.loss_mask, "reward": s.reward, "rollout_log_probs": s.rollout_log_probs,
            }
            for s in samples
        ],
    }  # fmt: skip
    (directory / "job.json").write_text(json.dumps(job, default=list))
    python = make_environment(directory / "venv")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PEX"))}
    environment |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"}
    script = str(Path(__file__).with_name("parity_trl.py"))
    done = subprocess.run([python, script, directory], capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: load_file(directory / f"trl-{name}.safetensors") for name in CASES}


def make_environment(path: Path) -> Path:
    """A virtual environment with TRL in front of what this process can import; its interpreter."""
    command = [uv.find_uv_bin(), "--quiet"]
    subprocess.run([*command, "venv", "--no-project", "--python", sys.executable, str(path)], check=True, timeout=60)
    python = path / "bin" / "python"
    subprocess.run(
        [*command, "pip", "install", "--python", str(python), "--no-deps", *REQUIREMENTS], check=True, timeout=300
    )
    (packages,) = path.glob("lib/python*/site-packages")
    # This environment's packages come behind TRL's own.
    installed = [entry for entry in sys.path if any(Path(entry).glob("*.dist-info"))]
    (packages / "ours.pth").write_text("\n".join(installed) + "\n")
    return python


@dataclasses.dataclass
class Result:
    gradients: dict[str, torch.Tensor]
    loss: float
    advantages: list[float]


def run_ours(directory: Path, samples: list[Sample], name: str, backend_name: str) -> Result:
    """One update of our trainer, up to its optimizer."""
    case = CASES[name]
    values: dict[str, Any] = {"grpo_std_normalization": False} | case.ours
    values = {key: f"{directory}/reducer.py:constant" if v == REDUCER else v for key, v in values.items()}
    settings = TrainerSettings(
        hf_checkpoint=str(directory / "policy"), ref_load=str(directory / "reference"), train_backend=backend_name,
        n_samples_per_prompt=GROUP_SIZE, rollout_batch_size=GROUPS, use_dynamic_batch_size=True, max_tokens_per_gpu=40,
        use_rollout_logprobs=case.off_policy, **values,
    ).on("cpu")  # fmt: skip
    ranks = Ranks(0, 1, "", 1)
    backend = build_backend(settings, ranks, torch.device("cpu"))
    gradients: dict[str, torch.Tensor] = {}

    def keep_gradients() -> tuple[float, float]:
        if backend_name == "megatron":
            gradients.update((key, tensor.clone()) for key, tensor in backend.named_gradients())
        else:
            gradients.update((key, p.grad.clone()) for key, p in backend.policy.named_parameters())
        return 0.0, 0.0

    backend.optimizer_step = keep_gradients
    summaries = [
        SimpleNamespace(
            index=s.index, group_index=s.group_index, rollout_id=None, total_length=len(s.tokens),
            response_length=s.response_length, loss_mask_sum=int(sum(s.loss_mask)), reward=s.reward,
            remove_sample=False,
        )
        for s in samples
    ]  # fmt: skip
    plan = Planner(settings).plan(0, summaries)
    metrics = TrainStep(settings, backend, ranks).run(plan, lambda positions: (samples[p] for p in positions))
    return Result(gradients, metrics["train/loss"], plan["rewards"])


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """|ours - theirs| / |theirs| over all parameters."""
    assert ours.keys() == theirs.keys()
    squares = [(float((ours[k] - g).square().sum()), float(g.square().sum())) for k, g in theirs.items()]
    return (sum(d for d, _ in squares) / sum(t for _, t in squares)) ** 0.5


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
@pytest.mark.parametrize("name", CASES)
def test_loss_gradients_and_advantages_are_those_of_trl(
    directory: Path, samples: list[Sample], trl: dict[str, dict[str, torch.Tensor]], name: str, backend: str
):
    theirs = dict(trl[name])
    loss, advantages = float(theirs.pop("loss")), theirs.pop("advantages").tolist()
    ours = run_ours(directory, samples, name, backend)
    off = difference(ours.gradients, theirs)
    print(f"{name} {backend}: gradient {off:.1e}, loss {ours.loss:.7f} {loss:.7f}")
    if CASES[name].different is not None:
        assert off > 2e-5, "these are equal now: " + CASES[name].different
        return
    assert off < 1e-5
    if CASES[name].trainer == "grpo":
        # A loss may be a small sum of large terms.
        assert ours.loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert ours.advantages == pytest.approx(advantages, rel=1e-5, abs=1e-6)


def test_standardised_advantages_differ_by_the_epsilon_alone(
    directory: Path, samples: list[Sample], trl: dict[str, dict[str, torch.Tensor]]
):
    for name, scope in (("grpo-std", GROUP_SIZE), ("grpo-std-batch", len(samples))):
        theirs = trl[name]["advantages"].tolist()
        ours = run_ours(directory, samples, name, "fsdp").advantages
        for i in range(len(samples)):
            first = i - i % scope
            deviation = statistics.stdev(s.reward for s in samples[first : first + scope])
            assert ours[i] * (deviation + 1e-6) == pytest.approx(theirs[i] * (deviation + 1e-4), rel=1e-5, abs=1e-7)


def test_the_cases_are_no_weak_ones(trl: dict[str, dict[str, torch.Tensor]]):
    """Clips, bounds and corrections change the gradient, and what is told apart differs."""
    pairs = [
        ("grpo", "grpo-clipped"), ("grpo-clipped", "grpo-delta"), ("grpo-clipped", "dapo"), ("grpo-clipped", "gspo"),
        ("grpo", "tis"), ("tis", "tis-both"), ("tis-both", "icepop"), ("icepop", "mis"), ("mis", "tis-sequence"),
        ("grpo-k3", "grpo-k3-ratio"), ("opsm", "grpo-clipped"), ("dapo", "dr_grpo"), ("dapo", "cispo"),
        ("rloo", "dr_grpo"),
    ]  # fmt: skip
    for one, other in pairs:
        gradients = [{k: v for k, v in trl[name].items() if k not in ("loss", "advantages")} for name in (one, other)]
        assert difference(*gradients) > 1e-2, (one, other)
