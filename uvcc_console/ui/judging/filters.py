"""The filter grammar of ``/``: words, ``!`` negation and comparisons, joined by "and".

``party=1 loss>3`` · ``!heartbeat`` · ``level>=warn`` · ``/regular.expression/`` · ``"two words"``.
A field that a row lacks never matches; one that a whole panel does not have says nothing about that panel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.run_files.eventlog import LEVELS as SHOWN_LEVELS

LEVELS = {**{name: 10 * i for i, name in enumerate(SHOWN_LEVELS, 1)}, "warning": 30}
_COMPARE = re.compile(r"([a-z_]+)(<=|>=|!=|=|<|>|~)(.+)", re.IGNORECASE)
Fields = Mapping[str, str | float]
Test = Callable[[Fields, str], bool]


@dataclass(frozen=True, slots=True)
class Filter:
    """A parsed filter. The empty one lets everything through."""

    source: str = ""
    tests: tuple[tuple[str, Test], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.tests)

    def matches(self, fields: Fields, text: str) -> bool:
        """Whether a row with these fields and this searchable (lower-case) text is shown."""
        return all(test(fields, text) for _, test in self.tests)

    def without(self, names: Collection[str]) -> Filter:
        """The filter for a panel whose rows never have these fields."""
        kept = tuple((name, test) for name, test in self.tests if name not in names)
        return self if len(kept) == len(self.tests) else Filter(self.source, kept)

    def words(self) -> Filter:
        """The part of the filter that asks for no field: for what has nothing but a name."""
        return Filter(self.source, tuple((name, test) for name, test in self.tests if not name))


def _value(name: str, raw: str | float) -> float | None:
    if isinstance(raw, str):
        if name == "level":
            return LEVELS.get(raw.lower())
        try:
            return float(raw)
        except ValueError:
            return None
    return float(raw)


_ORDER: dict[str, Callable[[float, float], bool]] = {
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
}


def _comparison(name: str, op: str, wanted: str) -> Test:
    name = name.lower()
    if op in _ORDER:
        bound = _value(name, wanted)
        if bound is None:
            if name == "level":
                raise ConfigError(f"there is no level {wanted!r}", f"there are {', '.join(SHOWN_LEVELS)}")
            raise ConfigError(f"{wanted!r} is not a number", f"write for example {name}{op}3")
        compare = _ORDER[op]

        def ordered(fields: Fields, text: str) -> bool:
            raw = fields.get(name)
            value = None if raw is None else _value(name, raw)
            return value is not None and compare(value, bound)

        return ordered
    if op == "~":
        pattern = _regex(wanted)
        return lambda fields, text: name in fields and bool(pattern.search(str(fields[name])))
    low, numeric = wanted.lower(), _value(name, wanted)

    def equal(fields: Fields, text: str) -> bool:
        if name not in fields:
            return False
        raw = fields[name]
        value = _value(name, raw)
        same = value == numeric if value is not None and numeric is not None else str(raw).lower() == low
        return same != (op == "!=")

    return equal


def _regex(source: str) -> re.Pattern[str]:
    try:
        return re.compile(source, re.IGNORECASE)
    except re.error as e:
        raise ConfigError(f"not a regular expression: {source!r}: {e}", "escape special characters with \\") from e


def _term(word: str) -> Test:
    if word.startswith("!") and len(word) > 1:
        inner = _term(word[1:])
        return lambda fields, text: not inner(fields, text)
    if len(word) > 2 and word.startswith("/") and word.endswith("/"):
        pattern = _regex(word[1:-1])
        return lambda fields, text: bool(pattern.search(text))
    if found := _COMPARE.fullmatch(word):
        return _comparison(*found.groups())
    low = word.lower()
    return lambda fields, text: low in text


def _field(word: str) -> str:
    """The field that a word asks for; "" for a word that is looked for in the text."""
    found = _COMPARE.fullmatch(word.lstrip("!"))
    return found.group(1).lower() if found and not word.startswith("/") else ""


def parse(source: str) -> Filter:
    """Read a filter. Raises ConfigError naming the part that cannot be read."""
    words = [w.replace('"', "") for w in re.findall(r'(?:[^\s"]|"[^"]*")+', source)]
    return Filter(source.strip(), tuple((_field(w), _term(w)) for w in words))
