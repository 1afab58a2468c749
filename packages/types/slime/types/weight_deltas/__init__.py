"""Deltas of weights: what changed between two versions, tensor by tensor, verified when it is applied.

The trainer encodes, engines apply; needs the extra `slime-types[deltas]`.
"""

# Ways in which deltas reach an engine: in the bytes of requests, through a directory on a disk, or through a whole
# checkpoint on the engine's own host, which is brought up to date from that directory.
CARRIERS = ("tensor", "disk", "checkpoint")

# The function that SGLang's processes run, as a weight loader, to bring the checkpoint on their host up to date.
PULL = "slime.rollout.engines.sglang.local_checkpoint.pull_weights"


def checkpoint_name(version: int, lineage: str) -> str:
    """Returns the name of a version's directory on the host of SGLang engines; the lineage tells runs apart."""
    return f"weight_v{version:06d}-{lineage}"


def process_of(lineage: str) -> str:
    """Returns the part of a lineage that all lineages of a trainer process share."""
    return lineage.partition(".")[0]
