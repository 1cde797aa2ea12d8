"""Files beside a proof bundle that follow from it: how they are made, and whether those at hand say the same.

People read these files, not the bundle. Whoever hands them over signs them as they are (see :mod:`manifest`); what can
be computed from what the parties signed is compared with that, so that not even the collector can misreport it.
"""

from __future__ import annotations

import csv
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError, VerificationError
from uvcc_engine.contract.ids import sid_replica
from uvcc_engine.contract.job.topology import PARTIES, Coord
from uvcc_engine.contract.parsing.canonical import canonical, same_json
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.text import clean
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.roots import replica_order, sid_of, subsession_root
from uvcc_engine.transcript.proof.bundle import POLICY_FILE, SIGNATURES_FILE, Bundle, WorkerPart
from uvcc_engine.transcript.proof.revealed_series import revealed_series
from uvcc_engine.transcript.signed.statements import coord_of
from uvcc_engine.transcript.signing.signers import each_key, read_allowed_signers
from uvcc_engine.transcript.terms.policy import read_signatures

DP_ROOTS: Final = "dp_roots.json"
DP_MATRIX: Final = "dp_matrix.md"
AUDIT: Final = "audit_bundle.json"
BY_COORD: Final = "roots_by_coord.json"
SIGNERS: Final = "allowed_signers"
TRAINING: Final = files.TRAINING
VAL: Final = files.VAL
_OF_VALIDATION: Final = "val_"
_GENERATED: Final = "- Generated: "
_POD: Final = re.compile(r"p[0-9]{1,6}r[0-9]{1,6}")
_RESULT: Final = re.compile(r"result(?:_rank[0-9]{1,6})?\.json")
_MOST: Final = 64 * reading.MIB
_MOST_NAMES: Final = 100_000


def _hex(data: bytes) -> str:
    return f"0x{data.hex()}"


# ---- making ---------------------------------------------------------------------------------------------------------


def _parts(bundle: Bundle) -> dict[Coord, WorkerPart]:
    return {w.coord: w for w in bundle.workers}


def dp_roots(bundle: Bundle) -> dict[str, Any]:
    """``dp_roots.json``. ``replica_epoch_roots_hex``: per replica its workers' roots by (party, stage, tensor)."""
    parts, size, sid = _parts(bundle), bundle.policy.topology, bundle.policy.sid_job
    epochs = []
    for stated in bundle.epochs:
        at = stated["epoch"]
        roots = [[_hex(parts[c].roots[at][1].root.root) for c in replica_order(size, r)] for r in range(size.replicas)]
        epochs.append(
            {
                "epoch": at,
                "replica_epoch_roots_hex": roots,
                "replica_roots_hex": [f"0x{h}" for h in stated["replica_roots"]],
                "global_root_hex": f"0x{stated['global_root']}",
            }
        )
    replicas = [{"replica_id": r, "sid_rep_hex": _hex(sid_replica(sid, r))} for r in range(size.replicas)]
    overall = {"sid_job_hex": _hex(sid), "run_root_hex": f"0x{bundle.run_root}"}
    return {**overall, "replicas": replicas, "epochs": epochs}


def dp_matrix(bundle: Bundle, generated: str) -> str:
    """``dp_matrix.md``: replicas and their roots at a glance."""
    parts, size, sid = _parts(bundle), bundle.policy.topology, bundle.policy.sid_job
    first = bundle.epochs[0]
    lines = [
        "# Replicas and roots",
        "",
        f"- Generated: {generated}",
        f"- Replicas: {size.replicas} (x {PARTIES} parties x {size.stages} stages x {size.tensor} tensor ranks)",
        f"- Result hash: {', '.join(f'0x{h}' for h in bundle.result_hashes)}",
        f"- Global epoch0 root: 0x{first['global_root']}",
        f"- Global root of the last epoch ({bundle.epochs[-1]['epoch']}): 0x{bundle.epochs[-1]['global_root']}",
        "",
        "| replica_id | sid_rep | epoch0_root | replica_root_epoch0 |",
        "|---|---|---|---|",
    ]
    for r in range(size.replicas):
        roots = "<br>".join(f"{c} {_hex(parts[c].roots[0][1].root.root)}" for c in replica_order(size, r))
        lines.append(f"| {r} | {_hex(sid_replica(sid, r))} | {roots} | 0x{first['replica_roots'][r]} |")
    return "\n".join(lines) + "\n"


def audit_bundle(bundle: Bundle) -> dict[str, Any]:
    """``audit_bundle.json`` of the last epoch. Everything in it follows from the signed proof bundle."""
    size, sid, last, parts = bundle.policy.topology, bundle.policy.sid_job, bundle.epochs[-1], _parts(bundle)
    replicas = [
        {"replica": r, "sid_rep_hex": _hex(sid_replica(sid, r)), "replica_root_hex": f"0x{last['replica_roots'][r]}"}
        for r in range(size.replicas)
    ]
    return {
        "sid_job_hex": _hex(sid),
        "step_id": last["epoch"],
        "topology": {"R": size.replicas, "S": size.stages, "T": size.tensor, "M": size.microbatches},
        "global_root_hex": f"0x{last['global_root']}",
        "run_root_hex": f"0x{bundle.run_root}",
        "replica_roots": replicas,
        "subsession_roots": [_subsession(bundle, parts, c) for c in parts if c.party == 0],
    }


def _subsession(bundle: Bundle, parts: Mapping[Coord, WorkerPart], anchor: Coord) -> dict[str, Any]:
    """The root of one subsession in the last epoch: what its three workers signed, as one hash."""
    three = [parts[Coord(anchor.replica, p, anchor.stage, anchor.tensor)].roots[-1][1].root for p in range(PARTIES)]
    root = subsession_root(sid_of(bundle.policy.sid_job, anchor), three[0].epoch, [r.root for r in three])
    where = {"replica": anchor.replica, "stage": anchor.stage, "tensor": anchor.tensor}
    return {**where, "subsession_root_hex": _hex(root)}


# ---- checking ------------------------------------------------------------------------------------------------------


def check(folder: Path, bundle: Bundle) -> int:
    """Compare whatever lies in a phase's folder and follows from its bundle; returns how many files were compared.

    A file that is not there is no lie; the manifest names what is gone. Raises VerificationError ("derived") naming the
    first file that says something else, UnreadableError for one that cannot be read.
    """
    compared = 0
    for name, same in _computed(folder, bundle):
        if not same:
            raise VerificationError("derived", f"{reading.shown(name)} says something else than the signed bundle")
        compared += 1
    return compared


def _computed(folder: Path, bundle: Bundle) -> Iterator[tuple[Path, bool]]:
    there = _there(folder)
    for home in (folder, *(folder / name for name in there if _POD.fullmatch(name))):
        yield from _policies(home, bundle)
    for name, value in ((DP_ROOTS, dp_roots), (AUDIT, audit_bundle)):
        if name in there:
            yield folder / name, same_json(reading.read_json(folder / name, _MOST), value(bundle))
    if DP_MATRIX in there:
        yield (
            folder / DP_MATRIX,
            _matrix(reading.read_text(folder / DP_MATRIX, _MOST)) == _matrix(dp_matrix(bundle, "")),
        )
    if BY_COORD in there:
        yield folder / BY_COORD, _by_coord(reading.read_json(folder / BY_COORD, _MOST), bundle)
    if SIGNERS in there:
        yield folder / SIGNERS, _signers(folder / SIGNERS, bundle)
    for name in there:
        if _POD.fullmatch(name):
            yield from _pod(folder / name, bundle)


def _there(folder: Path) -> list[str]:
    """Names in one folder; none where it is a link or cannot be listed, which is the certificate's to say."""
    try:
        if folder.is_symlink():
            return []
        with os.scandir(folder) as listing:
            return sorted(e.name for e in itertools.islice(listing, _MOST_NAMES))
    except OSError:
        return []


def _policies(home: Path, bundle: Bundle) -> Iterator[tuple[Path, bool]]:
    names = _there(home)
    if POLICY_FILE in names:
        path = home / POLICY_FILE
        yield path, reading.read_file(path, _MOST).removesuffix(b"\n") == bundle.policy.canonical
    if SIGNATURES_FILE in names:
        path = home / SIGNATURES_FILE
        yield path, read_signatures(path) == dict(bundle.signatures)


def _matrix(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith(_GENERATED)]


def _by_coord(found: Any, bundle: Bundle) -> bool:
    """Pods and hosts are the operator's word; coordinates, ranks and roots are the parties'.

    A worker of another domain has left no log here.
    """
    size = bundle.policy.topology
    wanted = [
        {
            **{"party": w.coord.party, "replica": w.coord.replica, "stage": w.coord.stage, "tp": w.coord.tensor},
            "local_rank": size.local_rank(w.coord),
            "epoch": w.roots[-1][1].root.epoch,
            "epoch_root_hex": _hex(w.roots[-1][1].root.root),
            "remote_log": f"worker_{w.coord}.log",
        }
        for w in bundle.workers
    ]
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        return False
    logs = [
        {"remote_log": w["remote_log"]} if row.get("remote_log") == "" else {}
        for row, w in zip(found, wanted, strict=False)
    ]
    rows = [{k: v for k, v in row.items() if k in wanted[0]} for row in found]
    return len(rows) == len(wanted) and same_json([row | log for row, log in zip(rows, logs, strict=True)], wanted)


def _signers(path: Path, bundle: Bundle) -> bool:
    """Each pod of the policy that the file names is named with the policy's key."""
    signers = read_allowed_signers(path)
    for party in bundle.policy.parties:
        for replica in range(1 + len(party.pods)):
            keys = set(each_key(signers, f"P{party.party}" + (f"r{replica}" if replica else "")))
            if keys and keys != {party.of_replica(replica).ed25519}:
                return False
    return True


def _pod(home: Path, bundle: Bundle) -> Iterator[tuple[Path, bool]]:
    """What one pod's folder holds of its workers' signed statements."""
    parts = _parts(bundle)
    for name in _there(home):
        path = home / name
        if _RESULT.fullmatch(name):
            yield path, _result(reading.read_json(path, _MOST), parts)
        elif name == TRAINING:
            check_training_rows(signed_losses(bundle), path, bundle.policy.first_step)
            yield path, True
        elif name == VAL:
            check_validation_rows(bundle, path)
            yield path, True
        elif name.startswith(leaf_file.folder_name("")):
            worker = parts.get(coord_of(name.removeprefix(leaf_file.folder_name(""))))
            if worker is not None:
                yield from _transcript(path, worker)


def _result(found: Any, parts: Mapping[Coord, WorkerPart]) -> bool:
    """A worker's result file says nothing that its signed statement does not, beside the run and the time."""
    if not isinstance(found, dict):
        return False
    worker = parts.get(coord_of(found.get("coord")))
    if worker is None:
        return False
    signed, _ = worker.result
    stated = {**signed.statement, "signature": signed.signature}
    try:  # a count is written as 3.0 there and as 3 where it is signed, which is one number of JSON
        return canonical({k: v for k, v in found.items() if k not in ("run", "ts")}) == canonical(stated)
    except ConfigError:
        return False


def _transcript(folder: Path, worker: WorkerPart) -> Iterator[tuple[Path, bool]]:
    """The signed lines that the bundle was assembled from."""
    there = _there(folder)
    openings = (canonical(o.to_json()) + b"\n" for o in worker.openings)
    for name, lines in ((leaf_file.ROOTS, (s.line for s, _ in worker.roots)), (leaf_file.OPENINGS, openings)):
        if name in there:
            yield folder / name, _same(folder / name, lines)
    if leaf_file.RESULT in there:
        yield folder / leaf_file.RESULT, _same(folder / leaf_file.RESULT, iter((worker.result[0].line,)))


def _same(path: Path, lines: Iterator[bytes]) -> bool:
    """Whether a file consists of exactly these lines; at most one line more than them is read."""
    with reading.open_regular(path, 2**40) as file:
        return all(file.read(len(line)) == line for line in lines) and not file.read(1)


# ---- losses --------------------------------------------------------------------------------------------------------


def signed_losses(bundle: Bundle) -> dict[int, float]:
    """Steps done -> loss, as far as the parties signed it: in the root of each step that revealed it, and last."""
    found = dict(revealed_series(bundle).get("loss", ()))
    last = bundle.workers[0].result[1].values.get("loss")
    return found if last is None else {**found, bundle.steps: float(last)}


def _rows(path: Path) -> Iterator[dict[str, str]]:
    """The rows of a table. Raises ValueError for one in which a name could stand for two cells of a row."""
    rows = csv.DictReader(reading.read_text(path, _MOST).splitlines())
    names = list(rows.fieldnames or ())
    if len(set(names)) != len(names):
        raise ValueError("two columns of one name")
    for row in rows:
        if None in row:
            raise ValueError("a row of more cells than there are columns")
        yield row


def check_training_rows(losses: Mapping[int, float], path: Path, first_step: int = 0) -> int:
    """Hold a table of training against signed losses (by the table's ``step``); returns how many rows were compared.

    Rows up to ``first_step`` are those of another policy. Raises VerificationError naming the first row that differs
    or that nobody signed, UnreadableError for what is no table.
    """
    compared = 0
    try:
        for row in _rows(path):
            step, loss = int(row["step"]), float(row["loss"])
            if step in losses:
                compared += 1
                if not math.isclose(loss, losses[step], rel_tol=1e-8, abs_tol=1e-12):
                    raise VerificationError(
                        "derived", f"{reading.shown(path)} says loss {loss} after step {step}, signed is {losses[step]}"
                    )
            elif step > first_step:
                what = f"{reading.shown(path)} says loss {loss} after step {step}, for which none is signed"
                raise VerificationError("derived", what)
    except (KeyError, TypeError, ValueError, csv.Error) as e:
        raise UnreadableError(f"{reading.shown(path)} is no table of training: {reading.reason(e)}") from e
    return compared


def check_validation_rows(bundle: Bundle, path: Path) -> int:
    """Hold a table of validation against what was signed, in every step and column; returns how many numbers it has.

    Rows of before the job's first step are those of another policy. Raises VerificationError naming the first number
    that differs, lacks, or was signed by nobody, UnreadableError for what is no table.
    """
    signed: dict[int, dict[str, float]] = {}
    for name, series in revealed_series(bundle).items():
        for step, value in series if name.startswith(_OF_VALIDATION) else ():
            signed.setdefault(step, {})[name.removeprefix(_OF_VALIDATION)] = value
    compared = 0
    try:
        for row in _rows(path):
            step = int(row["step"])
            said = {name: float(cell) for name, cell in row.items() if cell and name != "step"}
            due = signed.get(step, {})
            if step <= bundle.policy.first_step:
                continue
            if said.keys() != due.keys():
                what = f"{reading.shown(path)} names {_listed(said)} after step {step}, signed are {_listed(due)}"
                raise VerificationError("derived", what)
            for name, value in due.items():
                compared += 1
                if not math.isclose(said[name], value, rel_tol=1e-8, abs_tol=1e-12):
                    what = f"{reading.shown(path)} says {name} {said[name]} after step {step}, signed is {value}"
                    raise VerificationError("derived", what)
    except (KeyError, TypeError, ValueError, csv.Error) as e:
        raise UnreadableError(f"{reading.shown(path)} is no table of validation: {reading.reason(e)}") from e
    return compared


def _listed(names: Iterable[object]) -> str:
    return clean(", ".join(sorted(map(str, names))), 200) or "none"
