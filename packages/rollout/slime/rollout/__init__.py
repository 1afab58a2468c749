"""Turns leased prompts into scored samples: engines, router, generation, rewards, filters, evaluation.

Nothing heavy is imported here; `slime-buffer` ships `slime.rollout.data_source` into the same package.
"""

__path__ = __import__("pkgutil").extend_path(__path__, __name__)
