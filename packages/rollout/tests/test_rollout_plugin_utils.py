"""`slime.utils.{misc, async_utils, processing_utils, mask_utils}`, as plug-ins written for slime use them."""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

from slime.rollout import sft_rollout
from slime.types import Sample
from slime.types.errors import InvalidField, InvalidSetting
from slime.utils import async_utils, misc
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.processing_utils import (
    build_processor_kwargs,
    encode_image_for_rollout_engine,
    load_processor,
    load_tokenizer,
)

NUM_GPUS = 0

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|s|> system helpful <|e|> {% endif %}"
    "{% for m in messages %}<|s|> {{ m.role }} {{ m.content }} <|e|> {% endfor %}"
    "{% if add_generation_prompt %}<|s|> assistant {% endif %}"
)
# As Qwen3's: without a default system message, and without the reasoning of turns that a user follows.
DROPS_REASONING = (
    "{% set last = namespace(at=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}<|s|> {{ m.role }} "
    "{{ m.content if loop.index0 > last.at or '</t>' not in m.content else m.content.split('</t> ')[1] }} <|e|> "
    "{% endfor %}{% if add_generation_prompt %}<|s|> assistant {% endif %}"
)
WORDS = (
    "<unk> <|s|> <|e|> system user assistant helpful be kind hi you <t> why </t> yes no bye FOR CALCULATING LOSS MASK"
)
CONVERSATION = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "<t> why </t> yes"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "no"},
]


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    words = [*WORDS.split(), "ONLY"]
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, chat_template=template, unk_token="<unk>")


def test_a_processor_gives_token_ids_as_lists_and_images_as_tensors() -> None:
    words = tokenizer(CHATML)
    words.add_special_tokens({"additional_special_tokens": ["<image>"]})
    images = CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    processor = LlavaProcessor(
        image_processor=images, tokenizer=words, patch_size=4, vision_feature_select_strategy="default"
    )
    keywords = build_processor_kwargs({"images": [Image.new("RGB", (8, 8))], "images_kwargs": {"do_rescale": False}})
    answer = processor(text="hi <image> bye", **keywords)
    image = words.convert_tokens_to_ids("<image>")
    hi, bye = words.convert_tokens_to_ids(["hi", "bye"])
    assert answer["input_ids"] == [[hi, image, image, image, bye]]
    assert answer["pixel_values"].shape == (1, 3, 8, 8)
    assert set(answer) == {"input_ids", "attention_mask", "pixel_values"}
    assert processor(text="hi", **build_processor_kwargs())["input_ids"] == [[hi]]


@pytest.mark.parametrize(("kind", "template"), [("qwen", CHATML), ("qwen3", DROPS_REASONING)])
def test_what_the_assistant_wrote_is_trained_on_with_its_reasoning(kind: str, template: str) -> None:
    masks = MultiTurnLossMaskGenerator(tokenizer(template), kind)
    ids, mask = masks.get_loss_mask(CONVERSATION)
    assert len(ids) == len(mask)
    assert masks.get_text_from_loss_mask(ids, mask) == ["<t> why </t> yes <|e|>", "no <|e|>"]
    assert masks.get_response_lengths([mask]) == [7]
    system = "<|s|> system helpful <|e|> " if kind == "qwen" else ""
    assert masks.tokenizer.decode(ids) == (
        f"{system}<|s|> user hi <|e|> <|s|> assistant <t> why </t> yes <|e|> "
        "<|s|> user bye <|e|> <|s|> assistant no <|e|>"
    )


@pytest.mark.parametrize(("kind", "template"), [("qwen", CHATML), ("qwen3", DROPS_REASONING)])
def test_a_system_message_takes_the_place_of_the_default_one(kind: str, template: str) -> None:
    masks = MultiTurnLossMaskGenerator(tokenizer(template), kind)
    ids, mask = masks.get_loss_mask([{"role": "system", "content": "be kind"}, *CONVERSATION[2:]])
    assert masks.tokenizer.decode(ids) == ("<|s|> system be kind <|e|> <|s|> user bye <|e|> <|s|> assistant no <|e|>")
    assert sum(mask) == 2


def test_a_conversation_becomes_a_sample_from_its_first_answer_on() -> None:
    masks = MultiTurnLossMaskGenerator(tokenizer(CHATML))
    sample = Sample(index=1, prompt=list(CONVERSATION))
    sft_rollout.fill(sample, masks)
    ids, mask = masks.get_loss_mask(CONVERSATION)
    first = mask.index(1)
    assert list(sample.tokens) == ids and list(sample.loss_mask) == mask[first:]
    assert sample.response_length == len(ids) - first and sample.status is Sample.Status.COMPLETED
    assert sample.response.startswith("<t> why </t> yes") and sample.reward == 0.0


@pytest.mark.parametrize("prompt", ["hi", CONVERSATION[:1], []])
def test_a_prompt_that_is_no_conversation_is_named(prompt: object) -> None:
    with pytest.raises(InvalidField, match=r"sample 1 .* at least one of the assistant; --input-key"):
        sft_rollout.fill(Sample(index=1, prompt=prompt), MultiTurnLossMaskGenerator(tokenizer(CHATML)))


def test_several_samples_of_a_conversation_are_refused() -> None:
    args = argparse.Namespace(n_samples_per_prompt=2)
    with pytest.raises(InvalidSetting, match="--n-samples-per-prompt 2"):
        sft_rollout.generate_rollout(args, 0, None)


def test_a_message_can_be_left_out_of_training() -> None:
    masks = MultiTurnLossMaskGenerator(tokenizer(CHATML))
    quiet = [CONVERSATION[0], CONVERSATION[1] | {"step_loss_mask": 0}, *CONVERSATION[2:]]
    ids, mask = masks.get_loss_mask(quiet)
    assert ids == masks.get_loss_mask(CONVERSATION)[0]
    assert masks.get_text_from_loss_mask(ids, mask) == ["no <|e|>"]


KINDS = ["qwen", "qwen3", "qwen3_5", "distill_qwen"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", ["1", "0", 2, -1, 0.5, float("nan"), [1]])
def test_a_mask_of_a_message_that_is_neither_0_nor_1_is_refused(kind: str, value: Any) -> None:
    masks = MultiTurnLossMaskGenerator(tokenizer(CHATML), kind)
    messages = [*CONVERSATION[:3], CONVERSATION[3] | {"step_loss_mask": value}]
    with pytest.raises(InvalidField, match=r"^messages\[3\].step_loss_mask: got .*, expected 0 or 1"):
        masks.get_loss_mask(messages)
    with pytest.raises(InvalidField, match=r"^sample 7 \(group 7\): messages\[3\].step_loss_mask: got "):
        sft_rollout.fill(Sample(index=7, group_index=7, prompt=messages), masks)


@pytest.mark.parametrize("value", [None, 1, 1.0, True])
def test_masks_of_messages_that_parquet_files_fill_up_are_those_of_messages_without(value: Any) -> None:
    masks = MultiTurnLossMaskGenerator(tokenizer(CHATML))
    filled = [message | {"step_loss_mask": value} for message in CONVERSATION]
    assert masks.get_loss_mask(filled) == masks.get_loss_mask(CONVERSATION)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", ["hi", {"content": "hi"}, None, {"role": 1, "content": "hi"}])
def test_messages_that_are_no_objects_with_a_role_are_named_by_their_place(kind: str, bad: Any) -> None:
    masks = MultiTurnLossMaskGenerator(tokenizer(CHATML), kind)
    with pytest.raises(InvalidField, match=r"^messages\[2\]: got .*, expected an object with role and content"):
        masks.get_loss_mask([*CONVERSATION[:2], bad, CONVERSATION[3]])
    with pytest.raises(InvalidField, match=r"^sample 4 \(group None\): messages\[2\]: got .*; --input-key"):
        sft_rollout.fill(Sample(index=4, prompt=[*CONVERSATION[:2], bad, CONVERSATION[3]]), masks)
    with pytest.raises(InvalidField, match="^messages: got .*, expected a list of objects"):
        masks.get_loss_mask([])
    with pytest.raises(InvalidField, match="sample 4 .* at least one of the assistant; --input-key"):
        sft_rollout.fill(Sample(index=4, prompt=["hi", "yes"]), masks)


REFUSES = "{% if messages[0].role != 'user' or messages|length > 1 and messages[1].role == 'user' %}"
REFUSES = f"{REFUSES}{{{{ raise_exception('Roles must alternate.') }}}}{{% endif %}}{CHATML}"


def test_conversations_that_the_template_refuses_are_named_with_its_reason() -> None:
    masks = MultiTurnLossMaskGenerator(tokenizer(REFUSES), "qwen3_5")
    system = {"role": "system", "content": "be kind"}
    for messages in ([system], [system, CONVERSATION[1]]):
        with pytest.raises(InvalidField, match="^messages: got Roles must alternate., expected messages that the chat"):
            masks.get_loss_mask(messages)
    with pytest.raises(InvalidField, match=r"^sample 3 \(group None\): messages: got Roles must alternate"):
        sft_rollout.fill(Sample(index=3, prompt=messages), masks)
    with pytest.raises(InvalidSetting, match="--loss-mask-type must be .*, got 'qwen': .*says: Roles must alternate"):
        MultiTurnLossMaskGenerator(tokenizer(REFUSES), "qwen")
    with pytest.raises(InvalidField, match=r"^messages\[1\].content: got None, expected text"):
        MultiTurnLossMaskGenerator(tokenizer(CHATML), "distill_qwen").get_loss_mask(
            [CONVERSATION[0], {"role": "assistant", "content": None}]
        )


def test_a_distilled_model_trains_on_the_last_turn() -> None:
    masks = MultiTurnLossMaskGenerator(tokenizer(CHATML), "distill_qwen")
    ids, mask = masks.get_loss_mask(CONVERSATION[:2])
    assert masks.get_text_from_loss_mask(ids, mask) == ["<t> why </t> yes"]
    assert masks.tokenizer.decode(ids).endswith("<|s|> assistant <t> why </t> yes")
    with pytest.raises(ValueError, match="qwen4"):
        MultiTurnLossMaskGenerator(tokenizer(CHATML), "qwen4")


def test_functions_are_loaded_by_their_path(tmp_path: Path) -> None:
    assert misc.load_function("os.path.join")("a", "b") == "a/b"
    (tmp_path / "mine.py").write_text("def twice(x):\n    return 2 * x\n")
    assert misc.load_function(f"{tmp_path}/mine.py:twice")(4) == 8
    with pytest.raises(ValueError, match="no_such"):
        misc.load_function("os.path.no_such")


def test_a_singleton_is_made_once() -> None:
    class State(metaclass=misc.SingletonMeta):
        def __init__(self, value: int) -> None:
            self.value = value

    assert State(1) is State(2) and State(3).value == 1


def test_commands_ports_and_addresses() -> None:
    assert misc.exec_command("echo hi; true", capture_output=True) == "hi\n"
    with pytest.raises(subprocess.CalledProcessError):
        misc.exec_command("exit 3")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not misc.is_port_available(port)
        assert misc.get_free_port(port, 1) > port
    socket.inet_aton(misc.get_current_node_ip())


def test_periodic_actions() -> None:
    due = [i for i in range(10) if misc.should_run_periodic_action(i, 4, num_rollout_per_epoch=5)]
    assert due == [3, 4, 7, 9] and not misc.should_run_checkpoint_action(3, None)
    assert misc.should_run_periodic_action(6, 4, num_rollout=7)


def test_synchronous_code_runs_coroutines_on_one_loop() -> None:
    async def loop_of() -> asyncio.AbstractEventLoop:
        await asyncio.sleep(0)
        return asyncio.get_running_loop()

    async def nested() -> None:
        async_utils.run(loop_of())

    assert async_utils.run(loop_of()) is async_utils.run(loop_of()) is async_utils.get_async_loop().loop
    with pytest.raises(RuntimeError, match="await the coroutine"):
        async_utils.run(nested())


def test_tokenizers_processors_and_images(tmp_path: Path) -> None:
    tokenizer(CHATML).save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path))("hi you")["input_ids"] == tokenizer(CHATML)("hi you")["input_ids"]
    assert load_processor(str(tmp_path)) is None
    text = encode_image_for_rollout_engine(Image.new("RGBA", (3, 2), (255, 0, 0, 128)))
    image = Image.open(io.BytesIO(base64.b64decode(text)))
    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (3, 2))
