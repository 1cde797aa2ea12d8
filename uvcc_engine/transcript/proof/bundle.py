"""The proof bundle: one canonical JSON file that ties policy, identities, every epoch root and the result together.

Its layout is published as ``proof_bundle.schema.json`` beside this module. Reading is strict: an unknown field, a
different spelling or a missing part makes the file unreadable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.job.early_stop import Course, course
from uvcc_engine.contract.job.topology import PARTIES, Coord
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.exchange.evidence import read_signed
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.formats.reading import OLD, parse_canonical
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.json_lines import read_lines
from uvcc_engine.transcript.leaves.roots import epoch_roots, run_root
from uvcc_engine.transcript.leaves.store import Opening
from uvcc_engine.transcript.proof import head
from uvcc_engine.transcript.signed.openings import read_opening
from uvcc_engine.transcript.signed.statements import (
    ResultStatement,
    RootStatement,
    Signed,
    coord_of,
    count,
    digest,
    exact,
)
from uvcc_engine.transcript.terms.policy import Policy, read_signatures

FORMAT: Final = head.FORMAT
NAME: Final = leaf_file.BUNDLE
POLICY_FILE: Final = leaf_file.POLICY
SIGNATURES_FILE: Final = leaf_file.SIGNATURES
SCHEMA: Final = Path(__file__).with_name("proof_bundle.schema.json")
_FIELDS: Final = ("epochs", "format", "policy", "policy_signatures", "result_hashes", "run_root", "workers")
MOST_ENTRIES: Final = 20_000  # files and folders in which a few transcripts are looked for


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """One worker's evidence: its signed roots in epoch order, opened local leaves, signed result."""

    coord: Coord
    roots: tuple[tuple[Signed, RootStatement], ...]
    openings: tuple[Opening, ...]
    result: tuple[Signed, ResultStatement]


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle as read: well-formed, nothing checked. ``epochs``, ``run_root`` and ``result_hashes`` are as stated."""

    policy: Policy
    signatures: Mapping[int, str]
    workers: tuple[WorkerPart, ...]
    epochs: Sequence[Mapping[str, Any]]
    run_root: str
    result_hashes: Sequence[str]

    @property
    def steps(self) -> int:
        """After how many steps the run ended, by the policy's rule over the values that its first worker signed."""
        return self.course.steps

    @property
    def course(self) -> Course:
        """How the training went, by the same values."""
        values = (statement.values for _, statement in self.workers[0].roots)
        return course(self.policy.job, self.policy.first_step, values)


def read_bundle(path: Path, trusted: Callable[[Policy], bool] = lambda policy: False) -> Bundle:
    """Read a bundle file. Raises UnreadableError (ConfigError from the policy inside included).

    Its policy is read and its signatures are checked before anything else is held in memory. The bundle may then be as
    large as that policy's workers and steps need if ``trusted`` says that its three keys are known; a policy by
    unknown keys may state any size, so what they signed is read up to a fixed one.
    """
    stated, most = head.allowance(path, trusted)
    found = exact(parse_canonical(reading.read_file(path, most, named=True), str(path)), _FIELDS, "proof bundle")
    if found["policy"] != stated:
        raise UnreadableError(f"{reading.shown(path)} holds two policies")
    if found["format"] != FORMAT:
        raise UnreadableError(f"{reading.shown(path)} is of format {str(found['format'])[:60]!r}, not {FORMAT}", OLD)
    try:
        policy = Policy.from_json(found["policy"])
    except ConfigError as e:
        raise UnreadableError(f"the bundle's policy: {e.what}", e.hint) from e
    signatures = exact(found["policy_signatures"], [str(p) for p in range(PARTIES)], "list of policy signatures")
    if not all(isinstance(s, str) for s in signatures.values()):
        raise UnreadableError("a policy signature is not a text")
    hashes = _list(found["result_hashes"], "result_hashes")
    for value in (found["run_root"], *hashes):
        digest(value, "a root or result hash")
    return Bundle(
        policy,
        {int(p): s for p, s in signatures.items()},
        tuple(_worker(w) for w in _list(found["workers"], "workers")),
        [_epoch(e) for e in _list(found["epochs"], "epochs")],
        found["run_root"],
        hashes,
    )


def _epoch(data: Any) -> Mapping[str, Any]:
    found = exact(data, ("epoch", "global_root", "replica_roots"), "epoch")
    count(found["epoch"], "an epoch's number", 1 << 32)  # true equals 1 in Python, and is another file
    for value in (found["global_root"], *_list(found["replica_roots"], "replica_roots")):
        digest(value, "a root of an epoch")
    return found


def _worker(data: Any) -> WorkerPart:
    found = exact(data, ("coord", "openings", "result", "roots"), "worker")
    roots = [Signed.from_json(r) for r in _list(found["roots"], "roots")]
    result = Signed.from_json(found["result"])
    return WorkerPart(
        coord_of(found["coord"]),
        tuple((r, RootStatement.from_json(r.statement)) for r in roots),
        tuple(read_opening(o) for o in _list(found["openings"], "openings")),
        (result, ResultStatement.from_json(result.statement)),
    )


def _list(data: Any, what: str) -> list[Any]:
    if not isinstance(data, list):
        raise UnreadableError(f"{what} is not a list")
    return data


def most_entries(workers: int) -> int:
    """In how many files and folders the transcripts of so many workers are looked for."""
    return MOST_ENTRIES + 500 * workers


# ---- writing -------------------------------------------------------------------------------------------------------


def find_folders(root: Path, most: int = MOST_ENTRIES, unread: list[str] | None = None) -> dict[Coord, Path]:
    """Every worker's transcript folder under ``root``, links not followed, at most ``most`` entries looked at.

    Raises UnreadableError if one worker has two, for an odd name, for a link in place of a transcript, and for folders
    that cannot be listed; these go into ``unread`` where it is given.
    """
    found: dict[Coord, Path] = {}
    lying = reading.tree(root, most)
    if lying.unread and unread is None:
        raise UnreadableError(f"cannot list {reading.shown(root / lying.unread[0])}", "make it readable for yourself")
    if unread is not None:
        unread.extend(lying.unread)
    prefix = leaf_file.folder_name("")
    for name in sorted((*lying.folders, *lying.odd)):
        folder = root / name
        if not folder.name.startswith(prefix) or name in lying.unread:
            continue
        if name in lying.odd:
            raise UnreadableError(f"{reading.shown(folder)} is {lying.odd[name]}, not a folder", "put the folder there")
        coord = coord_of(folder.name.removeprefix(prefix))
        if coord in found:
            raise UnreadableError(f"two transcripts of {coord}: {found[coord]} and {folder}", "keep one of them")
        found[coord] = folder
    return found


def assemble(policy: Policy, signatures: Mapping[int, str], folders: Mapping[Coord, Path]) -> bytes:
    """The bundle's bytes from every worker's transcript folder (roots.jsonl, openings.jsonl, result.json).

    Raises UnreadableError if a worker's part is missing or damaged. Checks nothing: that is the verifier's work.
    """
    wanted = sorted(policy.topology.coords())
    if missing := [str(c) for c in wanted if c not in folders]:
        raise UnreadableError(f"no transcript of {', '.join(missing)}", "fetch it from the pod")
    parts, roots, hashes = [], [], []
    for coord in wanted:
        folder = folders[coord]
        signed = [Signed.from_json(o) for o in read_lines(folder / leaf_file.ROOTS)]
        result = read_signed(folder / leaf_file.RESULT)
        openings = read_lines(folder / leaf_file.OPENINGS)
        parts.append(
            {
                "coord": str(coord),
                "openings": openings,
                "result": result.to_json(),
                "roots": [s.to_json() for s in signed],
            }
        )
        roots.append([RootStatement.from_json(s.statement).root.root for s in signed])
        hashes.append(ResultStatement.from_json(result.statement).result_hash.hex())
    epochs, overall = derived_roots(policy, wanted, roots)
    return canonical(
        {
            "epochs": epochs,
            "format": FORMAT,
            "policy": policy.to_json(),
            "policy_signatures": {str(p): s for p, s in sorted(signatures.items())},
            "result_hashes": sorted(set(hashes)),
            "run_root": overall,
            "workers": parts,
        }
    )


def derived_roots(
    policy: Policy, coords: Sequence[Coord], roots: Sequence[Sequence[bytes]]
) -> tuple[list[dict[str, Any]], str]:
    """Replica and global roots of every epoch all workers finished, and the head of the run's tree over them."""
    epochs, tops = [], []
    for epoch, row in enumerate(zip(*roots, strict=False)):
        replicas, top = epoch_roots(policy.sid_job, policy.topology, epoch, dict(zip(coords, row, strict=True)))
        epochs.append({"epoch": epoch, "global_root": top.hex(), "replica_roots": [r.hex() for r in replicas]})
        tops.append(top)
    return epochs, run_root(tops).hex()


def assemble_folder(root: Path, out: Path | None = None) -> Path:
    """Assemble from a folder with policy.json, policy_signatures.json and transcripts anywhere below; returns the file.

    ``out`` defaults to ``root/proof_bundle.json``; it is replaced as a whole. Raises UnreadableError, ConfigError.
    """
    policy = Policy.load(root / POLICY_FILE)
    signatures = read_signatures(root / SIGNATURES_FILE)
    data = assemble(policy, signatures, find_folders(root, most_entries(policy.topology.workers)))
    path = out or root / NAME
    temporary = path.with_suffix(".part")
    temporary.write_bytes(data)
    os.replace(temporary, path)
    return path
