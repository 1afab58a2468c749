"""Deltas of weights: what changed between two versions, tensor by tensor, verified when it is applied.

The trainer encodes, engines apply; needs the extra `slime-types[deltas]`.
"""

# The function that SGLang's processes run, as a weight loader, to bring the checkpoint on their host up to date.
PULL = "slime.rollout.engines.sglang.local_checkpoint.pull_weights"
