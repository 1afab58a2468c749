"""YAML in which a mapping has each key once, as its specification says; PyYAML takes the last of several."""

from __future__ import annotations

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Not where mappings are made: by then "<<" has put keys into them that were not written there.
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is there twice", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return node


def load(text: str) -> Any:
    """Plain values only, as `yaml.safe_load`. Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)
