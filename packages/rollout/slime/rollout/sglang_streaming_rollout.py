"""Compatibility: `--custom-generate-function-path slime.rollout.sglang_streaming_rollout.generate_streaming`.

There, responses are streamed so that an aborted one keeps the tokens that it had. Engines of this project answer an
abort with those tokens, so that the default generation does the same.
"""

from slime.rollout.generate.sample import generate as generate_streaming

__all__ = ["generate_streaming"]
