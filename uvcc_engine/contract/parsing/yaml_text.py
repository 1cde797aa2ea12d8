"""YAML as people write it into profiles, policies and schemas: plain values, and no key twice.

YAML 1.2 (section 3.2.1.1) wants the keys of a mapping unique; PyYAML takes the last one silently, so that the line that
a reader sees first need not be the one that counts.
"""

from __future__ import annotations

from typing import Any

import yaml


class _Once(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
            seen.add(str(key.value))
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def load(text: str) -> Any:
    """The plain values of a document. Raises yaml.YAMLError with line and column, also for a key that stands twice."""
    return yaml.load(text, _Once)  # a loader of plain values, as safe_load's
