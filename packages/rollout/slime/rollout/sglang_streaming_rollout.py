"""Compatibility: `--custom-generate-function-path slime.rollout.sglang_streaming_rollout.generate_streaming`.

In slime, it streams responses so that an aborted response keeps its tokens. Here, engines answer an abort with the
tokens that they have, so that the default generation does the same.
"""

from slime.rollout.generate.sample import generate as generate_streaming

__all__ = ["generate_streaming"]
