from slime.data import Sample


async def generate_single(conversation):
    return conversation[-1]["content"].rstrip(">")[::-1]


def extract_tool_call(response):
    return None


def compute_reward(sample):
    return float(sample.response == sample.label)


def build_loss_mask(sample):
    return [1] * len(sample.response)


async def custom_generate(args, samples: list[Sample], evaluation: bool = False) -> list[Sample]:
    for sample in samples:
        conversation = (
            sample.prompt if isinstance(sample.prompt, list) else [{"role": "user", "content": sample.prompt}]
        )
        for _turn in range(args.max_turns):
            response = await generate_single(conversation)
            tool_call = extract_tool_call(response)
            if tool_call:
                conversation.append({"role": "assistant", "content": response})
                conversation.append({"role": "tool", "content": tool_call})
            else:
                sample.response = response
                break
        sample.reward = compute_reward(sample)
        sample.loss_mask = build_loss_mask(sample)
    return samples
