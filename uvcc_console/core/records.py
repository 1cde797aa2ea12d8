"""The run contract's records as a worker wrote them, read totally: what a field may hold, and how much of it is kept.

A record is used as a whole or refused as a whole where what it is about cannot be told (its step, its phase); of the
rest, what is not of its type is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from uvcc_engine.contract.outside import STEPS, real, said, tidy, whole, word

BEAT_NODES: Final = 64
_DIGEST: Final = re.compile(r"[A-Za-z0-9_.:+/=-]{1,128}")
_WHOLE: Final = ("rank", "pid", "sent_bytes", "collective_seq")
_REAL: Final = ("dt_fetch_s", "gate_entropy_mean", "gate_collapse_frac", "mem_mib", "bytes", "ts", "step_s")
_MEASURED: Final = ("loss", "toks_per_s", "samples_per_s")  # may be NaN: that is a finding
_WORDS: Final = ("msg", "halt_nonce", "waiting_on", "coord")


def beat(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """A heartbeat as far as it can be used; None if its step or phase is none."""
    step, phase = whole(record.get("step", -1), -1, STEPS), word(record.get("phase", ""), 32)
    if step is None or phase is None:
        return None
    found = tidy(record, nodes=BEAT_NODES, depth=3) | {"step": step}
    if "phase" in record:
        found["phase"] = phase
    for name in _WHOLE:
        if name in found and whole(found[name]) is None:
            del found[name]
    for name in _REAL:
        if name in found and real(found[name]) is None:
            del found[name]
    for name in _MEASURED:
        if name in found and (isinstance(found[name], bool) or not isinstance(found[name], int | float)):
            del found[name]
    for name in _WORDS:
        if name in found:
            found[name] = said(found[name], 200)
    return found


def root(fields: Mapping[str, Any], most: int = STEPS) -> tuple[int, str, dict[str, str]] | None:
    """(epoch, root, digest by peer) of a finalised epoch; None if it is none."""
    epoch, digest, pairs = whole(fields.get("epoch"), 0, most), fields.get("root"), fields.get("pairs", {})
    if epoch is None or not is_digest(digest) or not isinstance(pairs, Mapping) or len(pairs) > 64:
        return None
    if not all(isinstance(k, str) and 0 < len(k) <= 32 and k.isprintable() and is_digest(v) for k, v in pairs.items()):
        return None
    return epoch, str(digest), {str(k): str(v) for k, v in pairs.items()}


def is_digest(value: object) -> bool:
    """Whether this may be a hash, or whatever a trainer of another kind takes for one: short, and one plain word."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None
