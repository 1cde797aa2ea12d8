"""What a worker wrote before, read again when it goes on: its own files accuse nobody before they are proved whole.

Every line of ``roots.jsonl`` carries this worker's signature, every line of ``peers.jsonl`` a peer's, and every opened
leaf leads to a signed root. Where that fails, it is this worker's disk or memory that failed it, never a peer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.leaves.leaf_file import damaged
from uvcc_engine.transcript.leaves.roots import sid_of
from uvcc_engine.transcript.signed.openings import opens, read_opening
from uvcc_engine.transcript.signed.statements import RootStatement, Signed
from uvcc_engine.transcript.signing.sshsig import ROOT_NAMESPACE
from uvcc_engine.transcript.terms.policy import Policy

Line = tuple[Any, bytes]
Statements = dict[int, tuple[Signed, RootStatement]]  # by epoch


def signed_lines(
    path: Path, lines: Iterable[Line], policy: Policy, signers: Iterable[Coord]
) -> dict[Coord, Statements]:
    """The root statements of some workers from a file of this one. Raises UnreadableError naming file and line."""
    found: dict[Coord, Statements] = {c: {} for c in signers}
    for number, (data, line) in enumerate(lines, 1):
        try:
            signed = Signed.from_json(data)
            statement = RootStatement.from_json(signed.statement)
        except UnreadableError as e:
            raise damaged(path, f"line {number}", e.what) from e
        c, epoch = statement.coord, statement.root.epoch
        where = f"line {number} (epoch {epoch} of {c})"
        if c not in found or epoch in found[c] or statement.sid_job != policy.sid_job:
            raise damaged(path, where, "it does not belong there")
        if not signed.holds(policy.public(c.party, c.replica), ROOT_NAMESPACE) or signed.line != line:
            raise damaged(path, where, "its signature does not hold")
        found[c][epoch] = (signed, statement)
    return found


def opened_lines(
    path: Path, lines: Iterable[Line], own: Statements, policy: Policy, coord: Coord, resume_epoch: int
) -> dict[tuple[int, int], bytes]:
    """This worker's opened leaves by (epoch, index). Raises UnreadableError if one does not lead to its signed root."""
    found: dict[tuple[int, int], bytes] = {}
    sid = sid_of(policy.sid_job, coord)
    for number, (data, line) in enumerate(lines, 1):
        try:
            opening = read_opening(data)
        except UnreadableError as e:
            raise damaged(path, f"line {number}", e.what) from e
        known = own.get(opening.epoch)
        if canonical(data) + b"\n" != line or (known is not None and not opens(opening, sid, known[1].root)):
            raise damaged(path, f"line {number} (epoch {opening.epoch})", "it is not what the signed root holds")
        if (at := (opening.epoch, opening.index)) in found:
            raise damaged(path, f"line {number} (epoch {opening.epoch})", "it stands there twice")
        found[at] = line
    for epoch in range(resume_epoch):
        there = sum(1 for e, _ in found if e == epoch)
        if (due := own[epoch][1].root.opened) != there:
            raise damaged(path, f"epoch {epoch}", f"{there} opened leaves of {due}")
    return found


def none_missing(path: Path, found: Mapping[Coord, Statements], epochs: int) -> None:
    """Raises UnreadableError if a signed statement of the first ``epochs`` epochs is not there."""
    for c, statements in sorted(found.items()):
        for epoch in range(epochs):
            if epoch not in statements:
                raise UnreadableError(f"{path} lacks epoch {epoch} of {c}", "take the next attempt")
