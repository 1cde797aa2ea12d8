"""What a key of a profile may be where that can be listed: the words of a choice, true and false."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any


@cache
def choices() -> Mapping[str, tuple[str, ...]]:
    """``section.key`` -> its values as they are typed.

    Takes a second or two the first time: every provider that is installed is asked for its keys.
    """
    from uvcc_console.fleet.provider_kinds import known
    from uvcc_console.plan import own_profiles
    from uvcc_console.plan.meanings import keys

    found: dict[str, dict[str, None]] = {}
    for key, about in keys(own_profiles.schema()):
        found.setdefault(key, {}).update(dict.fromkeys(_words(about)))
    found["fleet.provider"] = dict.fromkeys(known())  # in the schema each provider's section has it as plain text
    return {key: tuple(words) for key, words in found.items() if words}


def _words(about: Mapping[str, Any]) -> list[str]:
    if about.get("type") == "boolean":
        return ["true", "false"]
    if "const" in about:
        return [str(about["const"])]
    if "enum" in about:
        return [str(word) for word in about["enum"]]
    return [word for part in about.get("anyOf", ()) for word in _words(part)]


def offered(line: str) -> list[str]:
    """``key=value`` for each value that the key before the ``=`` may have; nothing for a key without a list."""
    key, sign, _ = line.partition("=")
    return [f"{key}={word}" for word in choices().get(key.strip(), ())] if sign else []
