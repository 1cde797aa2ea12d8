"""YAML as people write it into profiles, policies and schemas: plain values, and no key twice.

YAML 1.2 (section 3.2.1.1) wants the keys of a mapping unique; PyYAML takes the last one silently, so that the line that
a reader sees first need not be the one that counts. It also reads 1:30 as the number 90, as YAML 1.1 does: a run that
was to live for an hour and a half would be ended after a minute and a half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import yaml

_MOST: Final = 1_000_000  # values of a document with all of its aliases in their places
_UNLIKE: Final = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""What PyYAML raises for a value that is none of its tag's."""


class _Once(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
            seen.add(str(key.value))
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except _UNLIKE as e:
            raise yaml.constructor.ConstructorError(None, None, f"no such value: {e}", node.start_mark) from e


def _number(kind: Callable[[_Once, yaml.ScalarNode], Any]) -> Callable[[_Once, yaml.ScalarNode], Any]:
    """What makes a number of a scalar, but text of one with colons."""
    return lambda loader, node: node.value if ":" in node.value else kind(loader, node)


_Once.add_constructor("tag:yaml.org,2002:int", _number(_Once.construct_yaml_int))
_Once.add_constructor("tag:yaml.org,2002:float", _number(_Once.construct_yaml_float))


def load(text: str) -> Any:
    """The plain values of a document. Raises yaml.YAMLError, and nothing else: with line and column for what is no
    YAML, a key that stands twice, a day that no calendar has or a number of thousands of digits; also for lists within
    lists within lists, and for a few lines that unfold to a million values or for ever."""
    try:
        found = yaml.load(text, _Once)  # a loader of plain values, as safe_load's
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except _UNLIKE as e:
        raise yaml.YAMLError(f"no such value: {e}") from e
    left, waiting = _MOST, [found]
    while waiting:
        one = waiting.pop()
        left -= 1
        if left < 0:
            raise yaml.YAMLError(f"its aliases unfold to more than {_MOST:,} values")
        waiting += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return found
