from slime.data import Sample


async def reward_func(args, sample: Sample, **kwargs) -> float:
    response = sample.response
    ground_truth = sample.label or sample.metadata.get("answer", "")
    if response.strip() == ground_truth.strip():
        return 1.0
    return 0.0


async def batched_custom_rm(args, samples: list[Sample]) -> list[float]:
    rewards = []
    for sample in samples:
        reward = await reward_func(args, sample)
        rewards.append(reward)
    return rewards
