"""Marks tests that run with SLIME_SLOW=1 alone, as CI does each night; see CONTRIBUTING.md."""

import os

import pytest

slow = pytest.mark.skipif(not os.environ.get("SLIME_SLOW"), reason="slow: SLIME_SLOW=1 runs it")
