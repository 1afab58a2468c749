"""Collections of Python's garbage collector in a process that serves."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def run(script: str) -> list[str]:
    """Runs a script in a process of its own, because the collector's settings are the whole process's."""
    words = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.split()


def test_collections_skip_what_was_there_and_collect_what_comes() -> None:
    answers = run("""
        import gc, weakref
        from slime.types.rpc.garbage import spare_long_lived

        class Node:
            pass

        def ring():
            node = Node()
            node.self = node
            return weakref.ref(node)

        gc.disable()
        before = ring()
        many = [[] for _ in range(10_000)]
        spare_long_lived()
        print(before() is None, any(each is many[0] for each in gc.get_objects()), gc.get_threshold()[0])
        after = ring()
        gc.collect()
        print(after() is None)
    """)
    assert answers == ["True", "False", "700", "True"]


def test_a_process_without_cycles_collects_rarely() -> None:
    answers = run("""
        import gc
        from slime.types.rpc.garbage import spare_long_lived

        spare_long_lived(collect_rarely=True)
        print(gc.get_threshold()[0] > 10_000)
    """)
    assert answers == ["True"]
