"""Opening secrets, checked: every missing component comes from one holder and its hash from the other.

A single party that lies is always detected. Which of the two holders lied cannot be told from the messages alone, so
the error names the pair. (Fast variant of the opening in Furukawa et al., EUROCRYPT 2017.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from blake3 import blake3
from torch import Tensor

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Round, Runtime, par
from uvcc_engine.mpc.foundation.share import Share, decode
from uvcc_engine.transcript.formats import kinds


def digest_of(label: bytes, *tensors: Tensor) -> Tensor:
    """BLAKE3 of a label and of tensors of any shape, as bytes ``[32]``."""
    hashed = blake3(label)
    for x in tensors:
        if x.numel():
            hashed.update(x.contiguous().cpu().numpy().data.cast("B"))
    return torch.frombuffer(bytearray(hashed.digest()), dtype=torch.uint8)


def _digest(x: Tensor) -> Tensor:
    return digest_of(b"UVCC_OPEN_V1", x)


def open_ring_protocol(rt: Runtime, x: Share) -> MpcProtocol[Tensor]:
    """Everybody learns ``x``: int64, its shape. 1 round, 24 bytes per element + 96. Reveals ``x``.

    ProtocolError naming the pair if the two holders of the missing component disagree.
    """
    message = Round(opening=True)
    message.send(rt.next, kinds.OPEN, x.first)
    message.send(rt.prev, kinds.OPEN, _digest(x.second))
    message.want(rt.prev, kinds.OPEN, torch.int64, *x.shape)
    message.want(rt.next, kinds.OPEN, torch.uint8, 32)
    got: list[Tensor] = yield message
    missing, digest = got
    _check(rt, missing, digest)
    return x.first + x.second + missing


def _check(rt: Runtime, missing: Tensor, digest: Tensor) -> None:
    if not torch.equal(_digest(missing), digest.cpu()):
        raise ProtocolError(
            f"parties {rt.prev} and {rt.next} disagree on a share opened to party {rt.party}: one of them altered it",
            "stop the run and compare both parties' transcripts of this epoch",
        )


def open_to_protocol(rt: Runtime, x: Share, party: int) -> MpcProtocol[Tensor | None]:
    """Only ``party`` learns ``x`` (None elsewhere). 1 round, 8 bytes per element + 32. Shape of ``x``."""
    message = Round(opening=True)
    if rt.next == party:
        message.send(party, kinds.OPEN, x.first)
    elif rt.prev == party:
        message.send(party, kinds.OPEN, _digest(x.second))
    else:
        message.want(rt.prev, kinds.OPEN, torch.int64, *x.shape)
        message.want(rt.next, kinds.OPEN, torch.uint8, 32)
    got: list[Tensor] = yield message
    if rt.party != party:
        return None
    _check(rt, got[0], got[1])
    return x.first + x.second + got[0]


def open_ring(rt: Runtime, x: Share) -> Tensor:
    """``open_ring_protocol``, run."""
    return rt.run(open_ring_protocol(rt, x))


def open_(rt: Runtime, x: Share) -> Tensor:
    """Everybody learns the number: float64. 1 round. Shape of ``x``."""
    return decode(open_ring(rt, x), x.f)


def open_many(rt: Runtime, xs: Sequence[Share]) -> list[Tensor]:
    """Several openings in one round. Shapes of the ``xs``."""
    rings = rt.run(par(*[open_ring_protocol(rt, x) for x in xs]))
    return [decode(ring, x.f) for ring, x in zip(rings, xs, strict=True)]


def open_to(rt: Runtime, x: Share, party: int) -> Tensor | None:
    """Only ``party`` learns the number: float64, None at the others. 1 round. Shape of ``x``."""
    ring = rt.run(open_to_protocol(rt, x, party))
    return None if ring is None else decode(ring, x.f)
