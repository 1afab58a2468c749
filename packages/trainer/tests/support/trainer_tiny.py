"""A model of a few thousand parameters, samples for it, and steps on it without services."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime.trainer.backends.build import build_backend, build_critic
from slime.trainer.batching.plan import Planner
from slime.trainer.batching.schedule import Lengths
from slime.trainer.batching.trunks import Prefixes, cuts_of, digests_at, thinned
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.step.step import TrainStep
from slime.trainer.trainer import pick_device
from slime.types import Sample
from slime.types.sample.summary import SampleSummary

VOCAB = 32
# Block size of FP8 models: no matrix has a multiple of both for its rows and columns.
BLOCK = (24, 20)
# Size of the groups of INT4 models.
GROUP = 16

# A turn: (tokens, 1 where the model wrote them).
Turn = tuple[Sequence[int], int]


def write_model(path: Path, seed: int = 0, tied: bool = False, layers: int = 2, experts: int = 0) -> str:
    """A Qwen3, dense or with experts, as a Hugging Face directory, with a file that stands for a tokenizer's."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    torch.manual_seed(seed)
    extra: dict[str, Any] = {}
    if experts:
        extra = dict(num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)
    config = (Qwen3MoeConfig if experts else Qwen3Config)(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=tied, initializer_range=0.3,
        pad_token_id=0, eos_token_id=1, bos_token_id=None, **extra,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return str(path)


def write_minimax_model(path: Path, **values: Any) -> str:
    """A MiniMax-M2 whose norms and biases of routers are random, too."""
    from transformers import AutoModelForCausalLM, MiniMaxM2Config

    torch.manual_seed(0)
    sizes = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, rotary_dim=8, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=256, initializer_range=0.15, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(MiniMaxM2Config(**(sizes | values)))
    for name, tensor in model.state_dict().items():
        if "norm" in name or "e_score" in name:
            tensor += 0.3 * torch.randn_like(tensor)
    model.save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return str(path)


def write_fp8_model(
    path: Path, block: tuple[int, int] = BLOCK, scale_fmt: str | None = None, experts: int = 0, fmt: str = "e4m3"
) -> Path:
    """A Qwen3 whose projections are FP8 in blocks, and everything else bfloat16; a MiniMax-M2 for its `fmt`."""
    from safetensors.torch import save_file

    from slime.converters.convert import fp8
    from slime.converters.files.safetensors_dir import SafetensorsDir

    minimax = fmt == "float8_e4m3fn"
    weights = dict(SafetensorsDir(write_minimax_model(path) if minimax else write_model(path, experts=experts)))
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if "_proj" in name or ".experts." in name:
            pair = fp8.quantize(tensor.bfloat16(), block, power_of_two=scale_fmt == "ue8m0")
            stored[name], stored[f"{name}_scale_inv"] = pair
        else:
            stored[name] = tensor.bfloat16()
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    quantization: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": list(block), "fmt": fmt}
    quantization |= {"activation_scheme": "dynamic"} | ({"scale_fmt": scale_fmt} if scale_fmt else {})
    config = json.loads((path / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_int4_model(path: Path, experts: int = 0) -> Path:
    """A Qwen3 whose projections are INT4 in groups of `GROUP`, those of its experts alone if it has some, as in
    Kimi-K2-Thinking; everything else is bfloat16."""
    from safetensors.torch import save_file

    from slime.converters.convert import int4
    from slime.converters.files.safetensors_dir import SafetensorsDir

    stored: dict[str, torch.Tensor] = {}
    for name, tensor in dict(SafetensorsDir(write_model(path, experts=experts))).items():
        if (".experts." if experts else "_proj") in name:
            stored[f"{name}_packed"], stored[f"{name}_scale"] = int4.quantize(tensor.bfloat16(), GROUP)
            stored[f"{name}_shape"] = torch.tensor(tensor.shape, dtype=torch.int64)
        else:
            stored[name] = tensor.bfloat16()
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    config = json.loads((path / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": quantization | {"ignore": ["lm_head"]}}
    (path / "config.json").write_text(json.dumps(config))
    return path


def dequantized(tensors: dict[str, torch.Tensor], block: tuple[int, int] = BLOCK) -> dict[str, torch.Tensor]:
    """Returns the weights that tensors of a checkpoint stand for, in float64."""
    from slime.converters.convert import int4

    found = {}
    for name, tensor in tensors.items():
        if name.endswith("_packed"):
            values = int4.unpack(tensor).double()
            weight = name.removesuffix("_packed")
            found[weight] = values * tensors[f"{weight}_scale"].double().repeat_interleave(GROUP, 1)
        if name.endswith(("_scale_inv", "_packed", "_scale", "_shape")):
            continue
        found[name] = tensor.double()
        if (factors := tensors.get(f"{name}_scale_inv")) is not None:
            found[name] *= spread(factors, tensor, block)
    return found


def spread(factors: torch.Tensor, tensor: torch.Tensor, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    """Returns the factor of each element of `tensor`, in float64."""
    by_element = factors.double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return by_element[: tensor.shape[0], : tensor.shape[1]]


_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "attention_bias": True, "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0, "use_qk_norm": False,
}  # fmt: skip
_GATED: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4, "max_position_embeddings": 256,
    "initializer_range": 0.15, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip
_GATED_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 12,
}  # fmt: skip
_GATED_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
    "num_position_embeddings": 16,
}  # fmt: skip
# Names of configurations, and whether the model has experts, and reads images.
GATED_KINDS = {
    "Qwen3NextConfig": (True, False),
    "Qwen3_5TextConfig": (False, False),
    "Qwen3_5MoeTextConfig": (True, False),
    "Qwen3_5Config": (False, True),
    "Qwen3_5MoeConfig": (True, True),
}


def write_gated_model(path: Path, kind: str, seed: int = 0, **values: Any) -> str:
    """A Hugging Face directory. Layers 1 to 3 are gated delta nets; norms and biases are random, too."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    experts, images = GATED_KINDS[kind]
    text = _GATED | (_GATED_EXPERTS if experts else {}) | values
    config_class = getattr(transformers, kind)
    config = config_class(text_config=text, vision_config=_GATED_VISION) if images else config_class(**text)
    torch.manual_seed(seed)
    model = (AutoModelForImageTextToText if images else AutoModelForCausalLM).from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or "dt_bias" in name or "gate.weight" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
        if "conv1d" in name:
            parameter.data += 0.5
    model.save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return str(path)


def write_ahead_model(path: Path) -> str:
    """A MiMo, with one multi-token-prediction layer."""
    ahead = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    return _write_by_table(path, _DECODER | ahead)


def write_biased_model(path: Path) -> str:
    """A GLM-4.5, whose routers have biases that no gradient moves."""
    kind = {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"]}
    return _write_by_table(path, _DECODER | _ROUTED | kind | {"head_dim": 8, "partial_rotary_factor": 0.5})


def write_sparse_model(path: Path, **values: Any) -> str:
    """A GLM-5 whose queries attend to five keys."""
    sparse = {
        "model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 3,
        "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
        "v_head_dim": 8, "index_topk": 5, "index_n_heads": 16, "index_head_dim": 8, "attention_bias": False,
    }  # fmt: skip
    return _write_by_table(path, _DECODER | _ROUTED | sparse | values)


def _write_by_table(path: Path, config: dict[str, Any]) -> str:
    """Random tensors of the names and shapes that the family's table has for `config`."""
    from slime.converters.families import find_family
    from slime.converters.files.safetensors_dir import write

    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = {block.name: block.shape for p in find_family(config).parameters(config) for block in p.blocks}
    write(path, ((name, 0.3 * torch.randn(shape, generator=generator)) for name, shape in shapes.items()))
    return str(path)


def make_samples(step: int = 0, groups: int = 3, size: int = 4, nuclei: bool = False) -> list[Sample]:
    """Groups with a common prompt and partly masked responses; the last group's rewards are equal.

    nuclei: whether the tokens were drawn from parts of the vocabulary.
    """
    random = np.random.default_rng(100 + step)
    samples: list[Sample] = []
    for group in range(groups):
        prompt = random.integers(2, VOCAB, 3 + group)
        for member in range(size):
            response = random.integers(2, VOCAB, int(random.integers(2, 7)))
            mask = np.ones(len(response), np.uint8)
            mask[1] = member % 2
            samples.append(
                Sample(
                    index=len(samples), group_index=group, tokens=np.concatenate([prompt, response]).astype(np.int32),
                    response_length=len(response), loss_mask=mask,
                    reward=1.0 if group == groups - 1 else float(member % 3),
                    rollout_log_probs=random.uniform(-4, -1, len(response)).astype(np.float32),
                )
            )  # fmt: skip
    for sample in samples if nuclei else ():
        add_nuclei(sample)
    return samples


def add_nuclei(sample: Sample) -> None:
    """Nuclei of 3 to 12 tokens, of which every fifth misses the token that was drawn; masked tokens have none."""
    random = np.random.default_rng(sample.index)
    ids: list[int] = []
    bounds = [0]
    mask = np.asarray(sample.loss_mask)
    for place, token in enumerate(sample.tokens[-sample.response_length :]):
        nucleus = set(random.choice(VOCAB, int(random.integers(3, 13)), replace=False).tolist()) if mask[place] else ()
        ids += sorted({*nucleus, token} if nucleus and len(ids) % 5 else nucleus)
        bounds.append(len(ids))
    sample.rollout_top_p_token_ids = np.array(ids, np.int32)  # type: ignore[assignment]
    sample.rollout_top_p_token_offsets = np.array(bounds, np.int64)  # type: ignore[assignment]


def sample_of(prompt: Sequence[int], turns: Sequence[Turn], **fields: Any) -> Sample:
    """Makes a sample of a prompt and turns, with log-probs that depend on its index."""
    response = [token for tokens, _ in turns for token in tokens]
    mask = [written for tokens, written in turns for _ in tokens]
    random = np.random.default_rng(fields.get("index", 0))
    fields = {"rollout_log_probs": random.uniform(-4, -1, len(response)).astype(np.float32)} | fields
    return Sample(tokens=[*prompt, *response], response_length=len(response), loss_mask=np.array(mask, np.uint8),
                  **fields)  # fmt: skip


def turn_samples() -> list[Sample]:
    """Makes a group whose samples have two turns in common, two of them three; a trajectory that fans out beside others
    of its group, as `slime.rollout.agents.merge` makes them; and a group of single turns."""
    random = np.random.default_rng(7)

    def draw(count: int) -> list[int]:
        return random.integers(2, VOCAB, count).tolist()

    found: list[Sample] = []

    def add(prompt: Sequence[int], *turns: Turn, **fields: Any) -> None:
        number = len(found)
        found.append(sample_of(prompt, turns, index=number, reward=float(number % 3), **fields))

    prompt, first, tool = draw(5), (draw(4), 1), (draw(3), 0)
    second, answer = (draw(3), 1), (draw(2), 0)
    add(prompt, first, tool, second, answer, (draw(3), 1), group_index=0)
    add(prompt, first, tool, second, answer, (draw(2), 1), group_index=0)
    add(prompt, first, tool, (draw(5), 1), group_index=0)
    add(prompt, first, tool, (draw(3), 1), (draw(2), 0), (draw(2), 1), group_index=0)
    prompt, first, tool = draw(6), (draw(5), 1), (draw(2), 0)
    # The first child of a turn goes on with its sample; another one has all before it in its prompt.
    add(prompt, first, tool, (draw(4), 1), group_index=1, rollout_id=100)
    add([*prompt, *first[0], *tool[0]], (draw(5), 1), group_index=1, rollout_id=100)
    add([*prompt, *first[0], *draw(3)], (draw(4), 1), group_index=1, rollout_id=100)
    add(prompt, (draw(3), 1), group_index=1, rollout_id=101)
    prompt = draw(4)
    for length in (3, 5, 4):
        add(prompt, (draw(length), 1), group_index=2)
    return found


def prefixes_of(samples: Sequence[Sample], experts_from: int | None = None) -> Prefixes:
    """Returns the prefixes of samples that are all of one group."""
    prompts = [len(s.array("tokens")) - s.response_length for s in samples]
    cuts = thinned(cut for s, prompt in zip(samples, prompts, strict=True) for cut in [prompt, *cuts_of(s)] if cut)
    digests = {i: digests_at(cuts, sample, experts_from) for i, sample in enumerate(samples)}
    return Prefixes([list(range(len(samples)))], [cuts], digests)


def prompt_lengths(samples: Sequence[Sample]) -> Lengths:
    """Returns lengths where equal prompts are shared, and nothing more."""
    prompts = [s.tokens[: len(s.array("tokens")) - s.response_length] for s in samples]
    return Lengths(
        [len(s.array("tokens")) for s in samples], {i: (tuple(prompt), len(prompt)) for i, prompt in enumerate(prompts)}
    )


def train_data(samples: Sequence[Sample]) -> dict[str, Any]:
    """The samples as a function of --custom-convert-samples-to-train-data-path may return them."""
    return {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": [float(i % 3) - 1.0 for i in range(len(samples))],
        "raw_reward": [s.reward for s in samples],
        "truncated": [0 for _ in samples],
        "sample_indices": [s.index for s in samples],
        "loss_masks": [s.loss_mask for s in samples],
        "rollout_ids": list(range(len(samples))),
        "rollout_mask_sums": [sum(s.loss_mask) for s in samples],  # type: ignore[union-attr]
    }


def summarize(samples: Sequence[Sample]) -> list[SampleSummary]:
    return [SampleSummary.of(sample) for sample in samples]


def make_settings(model: str, **values: Any) -> TrainerSettings:
    tokens = {"max_tokens_per_gpu": 40} if values.get("use_dynamic_batch_size", True) else {}
    values = {"lr": 1e-2, "use_dynamic_batch_size": True, "weight_decay": 0.1} | tokens | values
    return TrainerSettings(hf_checkpoint=model, **values)


def alone() -> Ranks:
    return Ranks(0, 1, "", 1)


class Runner:
    """Steps without services."""

    def __init__(
        self,
        settings: TrainerSettings,
        ranks: Ranks | None = None,
        weights: str | None = None,
        megatron: dict[str, Any] | None = None,
    ) -> None:
        self.settings = settings
        self.ranks = ranks or alone()
        device = pick_device(self.ranks.rank)
        self.backend = build_backend(settings, self.ranks, device, weights=weights, megatron=megatron)
        self.critic = build_critic(settings, self.ranks, device, self.backend)
        self.before_passes: Callable[[], None] = lambda: None
        self.before_update: Callable[[], None] = lambda: None
        self._step = TrainStep(
            settings,
            self.backend,
            self.ranks,
            critic=self.critic,
            before_passes=lambda: self.before_passes(),
            before_update=lambda: self.before_update(),
        )

    def run(self, step: int = 0, samples: Sequence[Sample] | None = None) -> dict[str, float]:
        samples = make_samples(step, nuclei=self.settings.samples_from_nuclei) if samples is None else samples
        return self.step(self.plan(step, samples), samples)

    def step(self, plan: dict[str, Any], samples: Sequence[Sample]) -> dict[str, float]:
        return self._step.run(plan, lambda positions: (samples[p] for p in positions))

    def plan(self, step: int, samples: Sequence[Sample]) -> dict[str, Any]:
        planner = Planner(self.settings, feeds_all=self.backend.needs_every_sample)
        return planner.plan(step, summarize(samples))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.backend.named_weights()}
