"""The advantage estimators by name, and what sets of them have in common."""

ESTIMATORS = ("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")
# Estimators that subtract the mean of a group from its rewards.
GROUP_NORMALIZED = frozenset({"grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"})
# Of those, the ones that also divide by the group's standard deviation.
GROUP_STANDARDIZED = frozenset({"grpo", "gspo", "cispo"})
WHITENED = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_baseline"})
