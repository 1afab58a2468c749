"""The question whether torch multiplies bfloat16 fast, put to builds of torch that stand in."""

from types import SimpleNamespace

import pytest

from slime.types.models.processor import multiplies_bfloat16


@pytest.mark.parametrize("supported", [True, False])
def test_onednn_answers_for_the_processor(supported: bool):
    mkldnn = SimpleNamespace(_is_mkldnn_bf16_supported=lambda: supported)
    torch = SimpleNamespace(
        backends=SimpleNamespace(mkldnn=SimpleNamespace(is_available=lambda: True)), ops=SimpleNamespace(mkldnn=mkldnn)
    )
    assert multiplies_bfloat16(torch) is supported


def test_a_torch_without_onednn_multiplies_bfloat16_slowly():
    # It has no operator to ask.
    torch = SimpleNamespace(backends=SimpleNamespace(mkldnn=SimpleNamespace(is_available=lambda: False)))
    assert multiplies_bfloat16(torch) is False
