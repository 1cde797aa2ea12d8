"""Signed records at the relay: orders to stop, and the workers' signs of life. Their one canonical spelling.

An order ``{type: order, run, nonce, mode, deadline_s}`` is signed by a key that the run's workers were started with; a
sign of life ``{type: beat, run, coord, ...}`` by the identity of the worker's party. The relay only carries them, under
the seals of ``boxes``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.formats.reading import parse_json
from uvcc_engine.transcript.signing import sshsig

ORDER_NAMESPACE: Final = "uvcc-order"
BEAT_NAMESPACE: Final = "uvcc-beat"
ORDER, BEAT = "order/", "beat/"


def sealed(content: Mapping[str, Any], sign: Callable[[bytes], str]) -> str:
    """A record's body: the content and its signature."""
    return json.dumps({"content": dict(content), "signature": sign(canonical(dict(content)))}, separators=(",", ":"))


def opened(body: str, namespace: str, keys: Iterable[str]) -> dict[str, Any] | None:
    """The content, if one of ``keys`` (OpenSSH lines) signed it; None for anything else. Never raises.

    A key that stands twice makes it nothing: another reader could take the other one for what was signed.
    """
    try:
        found = strict.exact(parse_json(body.encode(), "a record"), ("content", "signature"), "a record")
        content, signature = found["content"], found["signature"]
        payload = canonical(content)
    except (ConfigError, UnreadableError, ValueError):
        return None
    if not isinstance(content, dict) or not isinstance(signature, str):
        return None
    return content if any(sshsig.holds(key, namespace, payload, signature) for key in keys) else None
