"""Sets up Python's garbage collector for the processes of a run.

A full collection scans every object that torch, transformers, Ray and other libraries have loaded: a quarter of a
second, at any moment. The objects that a process has when it starts to serve stay, so scanning them finds nothing.
"""

from __future__ import annotations

import gc

# Containers allocated and not yet freed that trigger a collection, in a process where reference counting frees nearly
# everything; Python's default is 700. An answer of 256 tokens with log-probs, for one, consists of 260 lists.
YOUNG = 50_000
MIDDLE = 20
OLD = 100


def spare_long_lived(*, collect_rarely: bool = False) -> None:
    """Excludes all objects that exist by now from later collections.

    collect_rarely: also wait for much more garbage before each collection.

    Affects the whole process: call it where a process starts to serve, never on import.
    """
    gc.collect()
    gc.freeze()
    if collect_rarely:
        gc.set_threshold(YOUNG, MIDDLE, OLD)
