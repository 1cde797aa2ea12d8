"""What the parties hold of each other: histories that all three signed, revealed values, and the files that show it.

A party's key alone changes nothing after the fact, the last epoch included: every statement of a party is bound by the
head that both others sign in the next epoch, or in their results (``history``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from uvcc_engine.contract.errors import UnreadableError, VerificationError
from uvcc_engine.contract.job.private_job import MAY_LACK
from uvcc_engine.contract.job.topology import PARTIES, Coord
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.history import History, prove_extension
from uvcc_engine.transcript.leaves.replay import peers_of
from uvcc_engine.transcript.leaves.roots import run_root, sid_of
from uvcc_engine.transcript.proof.bundle import Bundle, WorkerPart
from uvcc_engine.transcript.signed.statements import ResultStatement, RootStatement, Signed
from uvcc_engine.transcript.signing.sshsig import RESULT_NAMESPACE, ROOT_NAMESPACE

_LONGEST: Final = 1 << 22  # bytes of a file of contradictions that is read
Head = tuple[int, str]


def at_party(coord: Coord, party: int) -> Coord:
    """The worker of another party in the same subsession."""
    return Coord(coord.replica, party, coord.stage, coord.tensor)


def check_histories(bundle: Bundle) -> None:
    """Every head is that of the statements before it, the results close them, and all state the same values.

    Expects all workers with the same epochs, signatures checked. Raises VerificationError.
    """
    by_coord = {w.coord: w for w in bundle.workers}
    for worker in bundle.workers:
        _check_values(bundle, worker)
    for anchor in [c for c in by_coord if c.party == 0]:
        three = [by_coord[at_party(anchor, p)] for p in range(PARTIES)]
        for worker in three:
            _check_verdicts(bundle, worker, three[0])
        history = History(sid_of(bundle.policy.sid_job, anchor))
        for row in zip(*(w.roots for w in three), strict=True):
            for _, statement in row:
                where = f"the head signed by {statement.coord} in epoch {statement.root.epoch}"
                _equal("history", where, statement.head, history.head)
            history.add({p: signed.digest for p, (signed, _) in enumerate(row)})
        for worker in three:
            _check_end(worker, three, history.head)


def _check_values(bundle: Bundle, worker: WorkerPart) -> None:
    for (_, mine), (_, first) in zip(worker.roots, bundle.workers[0].roots, strict=True):
        where = f"epoch {mine.root.epoch} of {worker.coord}"
        learned = bundle.policy.first_step + mine.root.epoch < bundle.steps
        wanted = set(bundle.policy.step_values(mine.root.epoch)) if learned else set()
        stated = set(mine.values) | (wanted & MAY_LACK)
        _equal("revealed values", f"what is revealed in {where}", sorted(stated), sorted(wanted))
        _equal("revealed values", f"the values of {where}", dict(mine.values), dict(first.values))


def _check_verdicts(bundle: Bundle, worker: WorkerPart, anchor: WorkerPart) -> None:
    """``anchor``: the worker of the first party at the same place of its party."""
    for (_, mine), (_, first) in zip(worker.roots, anchor.roots, strict=True):
        _check_verdict(bundle, worker, mine, first)


def _check_verdict(bundle: Bundle, worker: WorkerPart, mine: RootStatement, first: RootStatement) -> None:
    """Where products are proved, the three at each place signed one verdict, of at least one claim where anything was
    computed: every worker computes something in every step."""
    policy, where = bundle.policy, f"epoch {mine.root.epoch} of {worker.coord}"
    _equal("verdict", f"whether {where} states a proof", mine.proved is not None, policy.proves)
    if mine.proved is None or first.proved is None:
        return
    _equal("verdict", f"what was proved in {where}", mine.proved.to_json(), first.proved.to_json())
    learns = policy.first_step + mine.root.epoch < policy.steps
    if mine.proved.claims == 0 and (learns or set(worker.result[1].values) - {"loss"}):
        raise VerificationError("verdict", f"{where} computed, and states a proof of nothing")
    due = PARTIES if policy.proving.audit_one_in and mine.proved.claims else 0
    _equal("verdict", f"how many draws for audits {where} states", len(mine.proved.drawn), due)


def _check_end(worker: WorkerPart, three: Sequence[WorkerPart], head: bytes) -> None:
    result = worker.result[1]
    for peer in peers_of(worker.coord.party):
        there = three[peer]
        where = f"last root of {there.coord} as countersigned in the result of {worker.coord}"
        _equal("countersignature", where, result.seen[peer], there.roots[-1][1].root.root)
    _equal("history", f"the head signed in the result of {worker.coord}", result.head, head)


def check_head(bundle: Bundle, pinned: Head) -> None:
    """The run extends what somebody noted of it earlier: the head of its first epochs is the one that is named.

    That of the run's tree, or that of a subsession's, as its workers sign it while the run goes on. Raises
    VerificationError.
    """
    size, wanted = pinned
    epochs = len(bundle.workers[0].roots)
    if not 0 < size <= epochs:
        raise VerificationError("pinned head", f"a head over {size} epochs; the run has {epochs}")
    own = run_root([bytes.fromhex(e["global_root"]) for e in bundle.epochs[:size]]).hex()
    heads = {own} | {(w.roots[size][1] if size < epochs else w.result[1]).head.hex() for w in bundle.workers}
    if wanted not in heads:
        raise VerificationError("pinned head", f"the head over {size} epochs is {wanted}, recomputed {own}")


def prove_head(bundle: Bundle, size: int) -> tuple[bytes, bytes, list[bytes]]:
    """The run's head over its first ``size`` epochs, that over all, and the proof that the second extends the first.

    ``history.extends`` checks it without the bundle. Raises ConfigError if the run has not so many epochs.
    """
    roots = [bytes.fromhex(e["global_root"]) for e in bundle.epochs]
    proof = prove_extension(roots, size)
    return run_root(roots[:size]), run_root(roots), proof


# ---- files beside the leaves ---------------------------------------------------------------------------------------


def check_files(bundle: Bundle, folders: Mapping[Coord, Path]) -> None:
    """Every worker's folder holds its own statements as in the bundle, and its peers' as those signed them.

    Raises VerificationError naming file and line; UnreadableError if one cannot be read.
    """
    by_coord = {w.coord: w for w in bundle.workers}
    for coord, worker in by_coord.items():
        folder = folders[coord]
        own = [signed.line for signed, _ in worker.roots]
        _same_lines(folder / leaf_file.ROOTS, own, "this worker's roots in the bundle")
        opened = [canonical(o.to_json()) + b"\n" for o in worker.openings]
        _same_lines(folder / leaf_file.OPENINGS, opened, "this worker's opened leaves in the bundle")
        _same_lines(folder / leaf_file.RESULT, [worker.result[0].line], "this worker's result in the bundle")
        _check_peers(folder / leaf_file.PEERS, worker, by_coord)
        _check_contradictions(bundle, coord, folder / leaf_file.CONTRADICTIONS)


def _check_peers(path: Path, worker: WorkerPart, by_coord: Mapping[Coord, WorkerPart]) -> None:
    """One line of each peer and epoch, word for word what that peer signed."""
    peers = [by_coord[at_party(worker.coord, p)] for p in peers_of(worker.coord.party)]
    due = {signed.line: statement for peer in peers for signed, statement in peer.roots}
    for number, line in enumerate(_lines(path, sum(map(len, due))), 1):
        if due.pop(line, None) is None:
            raise VerificationError("peers", f"{path}:{number} {_odd(line, peers)}")
    if due:
        first = min(due.values(), key=lambda s: (s.root.epoch, s.coord))
        raise VerificationError("peers", f"{path} lacks the root of {first.coord} of epoch {first.root.epoch}")


def _odd(line: bytes, peers: Sequence[WorkerPart]) -> str:
    """What is wrong with a line that is not due."""
    try:
        signed = Signed.from_json(json.loads(line))
        statement = RootStatement.from_json(signed.statement)
    except (ValueError, RecursionError, UnreadableError) as e:
        return f"is no signed root statement: {str(e)[:200]!r}"
    known = {w.coord: w for w in peers}.get(statement.coord)
    said = f"holds a root of {statement.coord} of epoch {statement.root.epoch}"
    if known is None or statement.root.epoch >= len(known.roots):
        return f"{said}, which is no peer's, or of no epoch of this run"
    if signed.statement == known.roots[statement.root.epoch][0].statement:
        return f"{said} twice, or spelled or signed otherwise than in the bundle"
    return f"{said} that is not the one in the bundle"


def _check_contradictions(bundle: Bundle, coord: Coord, path: Path) -> None:
    """A worker that kept two statements which contradict each other proves that this run was not as agreed."""
    if not path.exists():
        return
    for number, line in enumerate(_lines(path, _LONGEST), 1):
        try:
            found = json.loads(line)
            what = repr(str(found["what"])[:200])
            both = [Signed.from_json(found[key]) for key in ("one", "two")]
            parties = [_signer(bundle, coord, signed) for signed in both]
        except (ValueError, RecursionError, KeyError, TypeError, UnreadableError) as e:
            raise VerificationError("contradictions", f"{path}:{number} is no record of a contradiction") from e
        if None in parties or both[0].statement == both[1].statement:
            raise VerificationError("contradictions", f"{path}:{number} holds what its parties did not sign")
        who = " and ".join(sorted({f"P{p}" for p in parties}))
        raise VerificationError("contradictions", f"{coord} kept two statements signed by {who}: {what}")


def _signer(bundle: Bundle, coord: Coord, signed: Signed) -> int | None:
    """Which party of this subsession signed a statement; None if nobody did."""
    is_result = "result_hash" in signed.statement
    reader = ResultStatement.from_json if is_result else RootStatement.from_json
    at = reader(signed.statement).coord
    namespace = RESULT_NAMESPACE if is_result else ROOT_NAMESPACE
    if at_party(at, coord.party) != coord or not signed.holds(bundle.policy.public(at.party, at.replica), namespace):
        return None
    return at.party


def _same_lines(path: Path, wanted: Sequence[bytes], what: str) -> None:
    """The file is these lines and nothing else. Raises VerificationError naming the first that differs."""
    there = _lines(path, sum(map(len, wanted)))
    number = 0
    for number, line in enumerate(wanted, 1):
        if next(there, None) != line:
            raise VerificationError("transcript files", f"{path}:{number} is not line {number} of {what}")
    if next(there, None) is not None:
        raise VerificationError("transcript files", f"{path}:{number + 1} follows the last of {what}")


def _lines(path: Path, most: int) -> Iterator[bytes]:
    """A regular file's lines, cut short where it holds more than ``most`` bytes and one."""
    if not path.is_file():
        raise UnreadableError(f"{path} is not there, or no file", "fetch the worker's transcript folder again")
    try:
        with path.open("rb") as file:
            return iter(file.read(most + 1).splitlines(keepends=True))
    except OSError as e:
        raise UnreadableError(f"cannot read {path}: {e.strerror}", "fetch it again") from e


def _equal(check: str, what: str, stated: object, found: object) -> None:
    """Raise VerificationError with both values unless they are equal."""
    if stated != found:
        shown = [(v.hex() if isinstance(v, bytes) else str(v))[:400] for v in (stated, found)]
        raise VerificationError(check, f"{what} is {shown[0]}, recomputed {shown[1]}")
