"""Final weights for the data owner alone: each party seals its two components to the owner's key.

The boxes may travel through anybody's hands. The owner opens all three and checks that both copies of every component
agree, so a party that alters its copy is found out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError, VerificationError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.data.sets import Floats
from uvcc_engine.sealing.box import seal, unseal
from uvcc_engine.sealing.components import Ring, decode_component, encode_component, pack_halves, unpack_halves
from uvcc_engine.transcript.signing.identity import Identity, PublicIdentity

_FORMAT: Final = "uvcc-weights-1"
_NO_BLIND: Final = bytes(32)


def box_name(coord: object) -> str:
    """Name of a worker's box inside its run directory."""
    return f"result_{coord}.box"


def seal_weights(
    halves: tuple[dict[str, Ring], dict[str, Ring]],
    *,
    party: int,
    frac_bits: int,
    identity: Identity,
    owner: str,
    sid_job: bytes,
) -> bytes:
    """One party's components ``party`` and ``party + 1`` of the named weights, sealed to ``owner`` (X25519, hex)."""
    parts = [
        (_NO_BLIND, encode_component((party + slot) % PARTIES, frac_bits, tensors))
        for slot, tensors in enumerate(halves)
    ]
    about = {"format": _FORMAT, "party": party, "sid_job": sid_job.hex()}
    return seal(pack_halves(parts), sender=identity, to=owner, about=about)


def open_weights(boxes: Sequence[bytes], *, owner: Identity, parties: Sequence[PublicIdentity]) -> dict[str, Floats]:
    """The weights in clear from the three parties' boxes, p0's first.

    Raises VerificationError if a box is not that party's, is of another job than p0's, or if two parties hold
    different copies of a component; UnreadableError if a box is damaged.
    """
    if len(boxes) != PARTIES or len(parties) != PARTIES:
        raise ConfigError(f"{len(boxes)} boxes of {len(parties)} parties", "give the boxes of all three parties")
    known: dict[int, tuple[int, dict[str, Ring]]] = {}
    frac_bits, sid_job = 0, None
    for party, (box, public) in enumerate(zip(boxes, parties, strict=True)):
        plain, about = unseal(box, recipient=owner, sender=public.x25519)
        sid_job = sid_job or about.get("sid_job")
        if about != {"format": _FORMAT, "party": party, "sid_job": sid_job}:
            raise VerificationError("weights", f"the box of P{party} says {about}", "give one job's boxes, in order")
        for slot, (_, encoded) in enumerate(unpack_halves(plain)):
            component = (party + slot) % PARTIES
            frac_bits, tensors = decode_component(component, encoded)
            holder, first = known.setdefault(component, (party, tensors))
            if not _equal(first, tensors):
                raise VerificationError(
                    "weights",
                    f"P{holder} and P{party} hold different copies of component {component}",
                    "one of them altered it; do not use these weights",
                )
    with np.errstate(over="ignore"):
        total = {name: known[0][1][name] + known[1][1][name] + known[2][1][name] for name in known[0][1]}
    return {name: ring.astype(np.float64) / 2.0**frac_bits for name, ring in total.items()}


def _equal(one: dict[str, Ring], two: dict[str, Ring]) -> bool:
    return one.keys() == two.keys() and all(np.array_equal(one[n], two[n]) for n in one)
