"""JSON values that the codec writes come back as `plain` returns them, bit for bit."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.types.errors import InvalidField
from slime.types.wire.json_fields import encode_plain, plain, to_json

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
    | st.floats(width=32).map(np.float32) | st.integers(-9, 9).map(np.int64)
)  # fmt: skip
TREES = st.recursive(
    SCALARS,
    lambda tree: st.lists(tree) | st.lists(tree).map(tuple) | st.dictionaries(st.text(max_size=3), tree),
    max_leaves=12,
)


@settings(deadline=None)
@given(TREES)
def test_a_plain_value_is_what_its_json_says(tree: Any) -> None:
    written = to_json(tree, "plan")
    # By repr, which tells -0.0 from 0.0, 1 from 1.0 and a list from a tuple, and finds NaN equal to NaN.
    assert repr(plain(tree, "plan")) == repr(json.loads(written))
    assert encode_plain(plain(tree, "plan")) == written


@pytest.mark.parametrize(("bad", "path"), [([1, {2}], "plan[1]"), ({"a": [0.5, [1, b"x"]]}, "plan.a[1][1]")])
def test_a_value_without_json_is_named_by_its_path(bad: Any, path: str) -> None:
    with pytest.raises(InvalidField) as caught:
        to_json(bad, "plan")
    assert caught.value.field == path
