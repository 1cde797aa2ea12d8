"""Final weights for the data owner alone: each party seals its two components to the owner's key.

The boxes may travel through anybody's hands. The owner opens all three and checks that both copies of every component
agree, so a party that alters its copy is found out. Each box says of which run and worker it is, so whoever carries
them can hand over neither those of another run of the same pods, nor those of one stage as another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError, VerificationError
from uvcc_engine.contract.job.topology import PARTIES, Coord
from uvcc_engine.contract.text import clean
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
    coord: Coord,
    frac_bits: int,
    identity: Identity,
    owner: str,
    sid_job: bytes,
) -> bytes:
    """The components ``party`` and ``party + 1`` of the named weights of one worker, sealed to ``owner`` (X25519,
    hex)."""
    party = coord.party
    parts = [
        (_NO_BLIND, encode_component((party + slot) % PARTIES, frac_bits, tensors))
        for slot, tensors in enumerate(halves)
    ]
    about = {"format": _FORMAT, "coord": str(coord), "sid_job": sid_job.hex()}
    return seal(pack_halves(parts), sender=identity, to=owner, about=about)


def open_weights(
    boxes: Sequence[bytes],
    *,
    owner: Identity,
    parties: Sequence[PublicIdentity],
    sid_job: str | None = None,
    stage: int = 0,
    tensor: int = 0,
) -> dict[str, Floats]:
    """The weights in clear from the three parties' boxes of one stage and tensor rank, p0's first.

    ``sid_job``: the session in hex that they must be of; None where only the boxes say so. Raises VerificationError if
    a box is not that party's, not of this place, or of another session than that or p0's, or if two parties hold
    different copies of a component; UnreadableError if a box is damaged.
    """
    if len(boxes) != PARTIES or len(parties) != PARTIES:
        raise ConfigError(f"{len(boxes)} boxes of {len(parties)} parties", "give the boxes of all three parties")
    known: dict[int, tuple[int, tuple[int, dict[str, Ring]]]] = {}
    for party, (box, public) in enumerate(zip(boxes, parties, strict=True)):
        plain, about = unseal(box, recipient=owner, sender=public.x25519)
        sid_job = about.get("sid_job") if sid_job is None else sid_job
        due = {"format": _FORMAT, "coord": str(Coord(0, party, stage, tensor)), "sid_job": sid_job}
        if about != due:
            what = f"the box of P{party} says {clean(str(about), 200)}, due is {due}"
            raise VerificationError("weights", what, "give one run's boxes, in order")
        for slot, (_, encoded) in enumerate(unpack_halves(plain)):
            component = (party + slot) % PARTIES
            copy = decode_component(component, encoded)
            holder, first = known.setdefault(component, (party, copy))
            if not _equal(first, copy):
                raise VerificationError(
                    "weights",
                    f"P{holder} and P{party} hold different copies of component {component}",
                    "one of them altered it; do not use these weights",
                )
    if len({bits for _, (bits, _) in known.values()}) != 1:
        raise VerificationError("weights", "the components say different fractional bits", "do not use these weights")
    (frac_bits, lowest), (_, middle), (_, highest) = (known[c][1] for c in range(PARTIES))
    with np.errstate(over="ignore"):
        total = {name: lowest[name] + middle[name] + highest[name] for name in lowest}
    return {name: ring.astype(np.float64) / 2.0**frac_bits for name, ring in total.items()}


def _equal(one: tuple[int, dict[str, Ring]], two: tuple[int, dict[str, Ring]]) -> bool:
    """Whether two copies are of the same numbers, and of as many fractional bits."""
    (bits, ours), (others, theirs) = one, two
    return bits == others and ours.keys() == theirs.keys() and all(np.array_equal(ours[n], theirs[n]) for n in ours)
