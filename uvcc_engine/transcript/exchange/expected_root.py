"""A peer's root message that is, letter for letter, what this worker can foresee of it.

Nearly all of what an honest peer says about an epoch is known here before it arrives: whose epoch it is, the head over
those before, what was revealed, what it countersigns, and what it was shown by the third party. A message that has all
of that in its one canonical spelling needs no reader of JSON, and no comparison of its parts: in every step that costs
a worker as much as half of a signature. Any other message is read and judged in full (``agreement``), which also says
what is wrong with it. Nothing is believed here: the signature and the pair's digest are the caller's to check.
"""

from __future__ import annotations

import re
from typing import Final

from uvcc_engine.transcript.leaves.roots import EpochRoot
from uvcc_engine.transcript.signed.statements import RootStatement, Signed, around_root

_BEGIN: Final = b'{"root":'
_SIGNED: Final = re.compile(
    rb'\{"signature":"([A-Za-z0-9+/= \\-]+)","statement":('
    rb'(\{"coord":"[a-z0-9]+","epoch":[0-9]+,"head":"[0-9a-f]{64}","leaves":)(0|[1-9][0-9]{0,14}),'
    rb'"opened":(0|[1-9][0-9]{0,9}),"pairs":\{"([0-9])":"([0-9a-f]{64})","([0-9])":"([0-9a-f]{64})"\},'
    rb'"root":"([0-9a-f]{64})"(,"seen":.+\}))\}'
)
_MOST_LEAVES: Final = 2**48
_MOST_OPENED: Final = 2**32


def as_expected(body: bytes, foreseen: RootStatement, third: Signed | None) -> Signed | None:
    """The peer's signed statement if ``body`` holds what is foreseen, in its one spelling; else None.

    ``foreseen``: the peer's statement but for its root, its counts and the digests of its pairs, which are read from
    the body; only the parties of the latter are looked at. ``third``: what it must pass on of the third party.
    """
    end = b',"third":%s}' % (b"null" if third is None else third.spelled)
    if foreseen.proved is not None or not (body.startswith(_BEGIN) and body.endswith(end)):
        return None
    found = _SIGNED.fullmatch(body, len(_BEGIN), len(body) - len(end))
    if found is None:
        return None
    signature, text, front, leaves, opened, low, low_digest, high, high_digest, root, back = found.groups()
    peers = sorted(foreseen.root.pairs)
    if (front, back) != around_root(foreseen) or [int(low), int(high)] != peers:
        return None
    if int(leaves) >= _MOST_LEAVES or int(opened) >= _MOST_OPENED:
        return None
    armored = signature.replace(rb"\n", b"\n")
    if b"\\" in armored:
        return None  # another escape than that of a line's end
    pairs = {p: _unhexed(d) for p, d in zip(peers, (low_digest, high_digest), strict=True)}
    statement = RootStatement(
        foreseen.coord,
        foreseen.sid_job,
        EpochRoot(foreseen.root.epoch, _unhexed(root), int(leaves), int(opened), pairs),
        foreseen.seen,
        foreseen.head,
        foreseen.values,
    )
    return Signed.read(statement, armored.decode(), text, found.group())


def _unhexed(digits: bytes) -> bytes:
    return bytes.fromhex(digits.decode())
