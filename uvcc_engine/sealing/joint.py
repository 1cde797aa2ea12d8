"""Several owners' inputs in one job: each seals its own shares, nobody sees another's.

Every owner's boxes stay as they are; a set lays them side by side and names each owner and its commitments. Where the
owners hold rows of one table they are put below each other; where they hold columns of the same rows, beside each
other, in the owners' order (``ColumnJoin``). What the
policy commits to is, per component, the hash of that list, so it binds every owner's every component and, for one
owner alone, nothing changes. The first owner is the one that results are sealed to.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError, UnreadableError, VerificationError
from uvcc_engine.contract.job.column_join import ColumnJoin
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.sealing.components import Ring
from uvcc_engine.sealing.inputs import PartyInputs, SharedInputs, open_inputs
from uvcc_engine.sealing.purpose import ProposedUse, Purpose
from uvcc_engine.transcript.signed.owner_shares import SET_MAGIC, OwnerPart, set_commitments, set_head
from uvcc_engine.transcript.signing.identity import Identity

MAGIC: Final = SET_MAGIC
_MAX_HEADER: Final = 1 << 20


def combine(shared: Sequence[SharedInputs]) -> SharedInputs:
    """Several owners' shared inputs as one. Raises ConfigError if they are not for the same pods, or of one owner."""
    if len(shared) < 2 or len({s.owner for s in shared}) != len(shared):
        raise ConfigError(f"{len(shared)} inputs of {len({s.owner for s in shared})} owners", "name each owner once")
    if len({len(s.replicas) for s in shared}) != 1:
        raise ConfigError("the owners shared for different numbers of replicas", "share again for the same parties")
    parts = [OwnerPart(s.owner, s.commitments) for s in shared]

    def laid(boxes: Sequence[tuple[bytes, bytes, bytes]]) -> tuple[bytes, bytes, bytes]:
        made = [lay(parts, [b[party] for b in boxes]) for party in range(PARTIES)]
        return made[0], made[1], made[2]

    replicas = tuple(laid(boxes) for boxes in zip(*[s.replicas for s in shared], strict=True))
    return SharedInputs(laid([s.boxes for s in shared]), set_commitments(parts), shared[0].owner, replicas)


def lay(parts: Sequence[OwnerPart], boxes: Sequence[bytes]) -> bytes:
    """One party's boxes side by side."""
    return b"".join([set_head(parts, [len(box) for box in boxes]), *boxes])


def open_set(
    box: bytes,
    *,
    party: int,
    identity: Identity,
    owner: str,
    commitments: Sequence[str],
    job: PrivateJob | None = None,
    use: ProposedUse | None = None,
) -> PartyInputs:
    """A party's inputs from one owner's box or from a set of several owners', put together in the owners' order.

    ``job``: what they are opened for, with these owners in this order, under the proposal of ``use``; each box must
    have been sealed for that. Raises what :func:`open_inputs` raises, and VerificationError if the set is not the one
    the policy commits to.
    """
    join = None if job is None else job.join
    if not box.startswith(MAGIC):
        if join is not None:
            join.check_owners(1)
        purpose = None if job is None else Purpose.of(job, [owner], use)
        return open_inputs(box, party=party, identity=identity, owner=owner, commitments=commitments, purpose=purpose)
    listed, boxes = _read(box)
    if set_commitments(listed) != tuple(commitments) or listed[0].owner != owner:
        raise VerificationError("inputs", "the set of owners is not the one the policy commits to", "combine it again")
    purpose = None if job is None else Purpose.of(job, [p.owner for p in listed], use)
    opened = [
        open_inputs(b, party=party, identity=identity, owner=p.owner, commitments=p.commitments, purpose=purpose)
        for p, b in zip(listed, boxes, strict=True)
    ]
    return _merge(opened, listed) if join is None else _side_by_side(opened, listed, join)


def _read(box: bytes) -> tuple[list[OwnerPart], list[bytes]]:
    try:
        (length,) = struct.unpack_from("<I", box, len(MAGIC))
        at = len(MAGIC) + 4 + length
        if length > _MAX_HEADER:
            raise ValueError("its header is too long")
        listed: list[dict[str, Any]] = json.loads(box[len(MAGIC) + 4 : at])
        parts, boxes = [], []
        for item in listed:
            first, second, third = (str(c) for c in item["commitments"])
            parts.append(OwnerPart(str(item["owner"]), (first, second, third)))
            size = item["bytes"]
            if type(size) is not int or not 0 <= size <= len(box) - at:
                raise ValueError("a box is longer than what is left")
            boxes.append(box[at : at + size])
            at += size
        if at != len(box) or not parts:
            raise ValueError("its boxes do not fill it")
        return parts, boxes
    except (ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
        raise UnreadableError(f"the set of sealed inputs cannot be read: {error}", "combine it again") from error


def _same_precision(opened: Sequence[PartyInputs], listed: Sequence[OwnerPart]) -> None:
    for number, (inputs, part) in enumerate(zip(opened, listed, strict=True)):
        if inputs.frac_bits != opened[0].frac_bits:
            raise ConfigError(
                f"owner {number} ({part.owner[:12]}) shared at {inputs.frac_bits} fractional bits,"
                f" the first at {opened[0].frac_bits}",
                "share again for one job",
            )


def _side_by_side(opened: Sequence[PartyInputs], listed: Sequence[OwnerPart], join: ColumnJoin) -> PartyInputs:
    """The owners' blocks of columns beside each other, both components of each, and the one owner's labels.

    Raises ConfigError naming an owner who gives other rows, columns or labels than the job says.
    """
    join.check_owners(len(opened))
    _same_precision(opened, listed)
    rows = {n.removesuffix("_y"): len(lo) for n, (lo, _) in opened[join.label].tensors.items() if n.endswith("_y")}
    for number, (inputs, part) in enumerate(zip(opened, listed, strict=True)):
        wanted = {f"{of}_x": (many, join.columns[number]) for of, many in rows.items() if join.columns[number]}
        given = {name: lo.shape for name, (lo, _) in inputs.tensors.items()}
        if number == join.label:
            given = {name: shape for name, shape in given.items() if not name.endswith("_y")}
        if given != wanted:
            raise ConfigError(
                f"owner {number} ({part.owner[:12]}) shared {given}, the job takes {wanted} of it",
                "all owners share the rows that they have in common, the columns of job.join, and one of them labels",
            )
    blocks = [inputs.tensors for number, inputs in enumerate(opened) if join.columns[number]]
    merged = {name: pair for name, pair in opened[join.label].tensors.items() if name.endswith("_y")}
    for name in (f"{of}_x" for of in rows):
        lo, hi = (np.concatenate([tensors[name][c] for tensors in blocks], axis=1) for c in range(2))
        merged[name] = (lo, hi)
    return PartyInputs(opened[0].party, opened[0].frac_bits, merged)


def _merge(opened: Sequence[PartyInputs], listed: Sequence[OwnerPart]) -> PartyInputs:
    merged: dict[str, tuple[Ring, Ring]] = {}
    _same_precision(opened, listed)
    for number, (inputs, part) in enumerate(zip(opened, listed, strict=True)):
        for name, (lo, hi) in inputs.tensors.items():
            if name not in merged:
                merged[name] = (lo, hi)
                continue
            before = merged[name]
            if name.startswith("weight.") or before[0].shape[1:] != lo.shape[1:]:
                raise ConfigError(
                    f"{name} of owner {number} ({part.owner[:12]}) has shape {lo.shape}, that before {before[0].shape}",
                    "owners contribute rows of one width; one of them contributes the weights",
                )
            merged[name] = (np.concatenate([before[0], lo]), np.concatenate([before[1], hi]))
    return PartyInputs(opened[0].party, opened[0].frac_bits, merged)
