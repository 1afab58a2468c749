"""Deltas of weights: what changed between two versions, tensor by tensor, verified when it is applied.

The trainer encodes, engines apply; needs the extra `slime-types[deltas]`.
"""

# Ways in which deltas reach an engine: in the bytes of requests, through a directory on a disk, through a whole
# checkpoint on the engine's own host, which is brought up to date from that directory, or in broadcasts between GPUs.
CARRIERS = ("tensor", "disk", "checkpoint", "nccl")

# The format, and the type of the one tensor, of a bucket that is broadcast to SGLang. No SGLang knows such a type by
# itself: without our plug-in it fails in place of loading the bytes as a weight.
BROADCAST = "slime_weight_delta"
# Begins the message of an engine that has received a bucket and not loaded it.
REFUSED = "the weight delta is refused: "

# The function that SGLang's processes run, as a weight loader, to bring the checkpoint on their host up to date.
PULL = "slime.rollout.engines.sglang.local_checkpoint.pull_weights"


def checkpoint_name(version: int, lineage: str) -> str:
    """Returns the name of a version's directory on the host of SGLang engines; the lineage tells runs apart."""
    return f"weight_v{version:06d}-{lineage}"


def process_of(lineage: str) -> str:
    """Returns the part of a lineage that all lineages of a trainer process share."""
    return lineage.partition(".")[0]
