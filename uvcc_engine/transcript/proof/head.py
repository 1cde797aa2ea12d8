"""The policy and its signatures out of a bundle that is not yet believed: found without holding the rest in memory."""

from __future__ import annotations

from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.formats.reading import OLD, parse_canonical
from uvcc_engine.transcript.terms.policy import LARGEST, Policy, check_signatures

FORMAT: Final = "uvcc-proof-bundle-v2"
UNKNOWN: Final = 24 * reading.MIB  # a bundle whose keys nobody vouches for
_EPOCHS: Final = b'{"epochs":['
_POLICY: Final = f'],"format":"{FORMAT}","policy":'.encode()
_SIGNATURES: Final = b',"policy_signatures":'
_STEP: Final = reading.MIB  # it stays in the processor's cache while it is searched
_SIGNED: Final = 64 * reading.KIB  # three signatures
# what one worker's statement of one epoch takes, with a checkpoint's opened leaf and its proof; and what it takes once
_EPOCH: Final = 12 * reading.KIB
_WORKER: Final = 64 * reading.KIB


def allowance(path: Path, trusted: Callable[[Policy], bool]) -> tuple[Any, int]:
    """The policy that a bundle states first (as JSON), and how large the bundle may be.

    Raises UnreadableError, VerificationError if the three parties have not signed that policy, and what ``trusted``
    raises.
    """
    with reading.open_regular(path, named=True) as file:
        try:
            data = _head(file, path)
        except OSError as e:
            raise UnreadableError(f"cannot read {reading.shown(path)}: {reading.reason(e)}") from e
    text, rest = _value(data, path, LARGEST)
    stated = parse_canonical(text, "the bundle's policy")
    try:
        policy = Policy.from_json(stated)
    except ConfigError as e:
        raise UnreadableError(f"the bundle's policy: {e.what}", e.hint) from e
    if not rest.startswith(_SIGNATURES):
        raise UnreadableError(f"{reading.shown(path)} is no proof bundle: no signatures follow its policy")
    signed = parse_canonical(_value(rest[len(_SIGNATURES) :], path, _SIGNED)[0], "the policy's signatures")
    parties = {str(p): p for p in range(PARTIES)}
    if not isinstance(signed, dict) or signed.keys() != parties.keys() or not _texts(signed):
        raise UnreadableError("the list of policy signatures does not name parties 0, 1 and 2, each with a text")
    known, scaled = trusted(policy), most_bytes(policy)
    check_signatures(policy, {parties[p]: s for p, s in signed.items()})
    return stated, scaled if known else min(scaled, UNKNOWN)


def most_bytes(policy: Policy) -> int:
    """How large a bundle of this policy's workers and steps can be."""
    epochs = policy.steps + 2
    per_epoch = policy.topology.workers * _EPOCH + (policy.topology.replicas + 2) * 100
    wanted = 4 * len(policy.canonical) + policy.topology.workers * _WORKER + epochs * per_epoch
    return min(wanted + reading.MIB, reading.LARGEST)


def _texts(signed: dict[str, Any]) -> bool:
    return all(isinstance(s, str) for s in signed.values())


def _head(file: BufferedReader, path: Path) -> bytes:
    """From the policy on, so many bytes as a policy and its signatures can take."""
    if file.read(len(_EPOCHS)) != _EPOCHS:
        raise UnreadableError(f"{reading.shown(path)} is no canonical JSON of a proof bundle", "fetch it again")
    keep = len(_POLICY) - 1  # of the last window, since the mark may lie across two
    window = bytearray(keep + _STEP)  # one for all: a gigabyte of filler is read at the speed of a copy
    fresh = memoryview(window)[keep:]
    at = len(_EPOCHS) - keep
    while size := file.readinto(fresh):
        found = window.find(_POLICY, 0, keep + size)
        if found >= 0:
            file.seek(at + found + len(_POLICY))
            return file.read(LARGEST + _SIGNED)
        window[:keep] = window[size : size + keep]
        at += size
    raise UnreadableError(
        f"{reading.shown(path)} is no proof bundle of format {FORMAT}", f"fetch it again; an older one: {OLD}"
    )


def _value(data: bytes, path: Path, most: int) -> tuple[bytes, bytes]:
    """The text of the object that ``data`` begins with, and what follows it."""
    depth = end = 0
    for found in reading.MARKS.finditer(data, 0, most):
        mark = found[0]
        depth += 1 if mark in (b"{", b"[") else -1 if mark in (b"}", b"]") else 0
        if depth <= 0:
            end = found.end()
            break
    if not data.startswith(b"{") or not end:
        raise UnreadableError(f"{reading.shown(path)} is no proof bundle: its policy does not end")
    return data[:end], data[end:]
