"""What one party's key, or two of them, can rewrite of a real finished run: nothing."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from mutation_kit import Target, joined, split

from uvcc_engine.bench.launch.fleet import Fleet, Forker, pod_identity
from uvcc_engine.contract.errors import UnreadableError, VerificationError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.history import History
from uvcc_engine.transcript.leaves.leaf import Leaf, blinded_digest, epoch_prefix, leaf_hash
from uvcc_engine.transcript.leaves.merkle import inclusion_proofs, tree_root
from uvcc_engine.transcript.leaves.roots import sid_of
from uvcc_engine.transcript.proof.bundle import derived_roots
from uvcc_engine.transcript.proof.verifier import verify
from uvcc_engine.transcript.signed.statements import (
    ResultStatement,
    RootStatement,
    Signed,
    result_core,
    sign_result,
    sign_root,
)

JOB = PrivateJob(model="logistic-digits", steps=3, batch=8, test_rows=20, checkpoint_every=1)
EPOCHS = JOB.steps + 1
Json = Any


@pytest.fixture(scope="module")
def target(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("one")
    fleet = Fleet(folder / "fleet", forker, JOB, Topology())
    fleet.launch()
    assert set(fleet.wait().values()) == {0}, fleet.logs()
    assert fleet.verified(folder / "evidence").level == "transcripts"
    return Target(folder / "evidence" / "proof_bundle.json")


class Forgery:
    """A copy of the run in which some parties rewrite what is theirs, as consistently as their keys allow."""

    def __init__(self, target: Target, folder: Path, parties: Sequence[int]) -> None:
        self.target, self.folder, self.parties = target, folder, parties
        self.json = copy.deepcopy(target.json)
        self.leaves = {p: split(target.leaves[f"transcript_p{p}r0s0t0"]) for p in parties}
        self.heads = True  # whether own heads follow what was rewritten

    def worker(self, party: int) -> Json:
        return self.json["workers"][party]

    def statement(self, party: int, epoch: int) -> Json:
        return self.worker(party)["roots"][epoch]["statement"]

    def opened(self, party: int, epoch: int, kind: int, payload: Callable[[bytes], bytes] | None) -> None:
        """Give an opened leaf another payload, or drop it; root, counts and proofs follow."""
        head, records = self.leaves[party][epoch]
        here = [o for o in self.worker(party)["openings"] if o["epoch"] == epoch]
        for opening in here:
            at, leaf = opening["index"], Leaf.unpack(bytes.fromhex(opening["record"]))
            if leaf.kind != kind:
                continue
            if payload is None:
                opening["dropped"] = True
                continue
            new = payload(bytes.fromhex(opening["payload"]))
            leaf = leaf._replace(size=len(new), digest=blinded_digest(kind, bytes.fromhex(opening["blind"]), new))
            records[at] = leaf.pack()
            opening.update(payload=new.hex(), record=leaf.pack().hex())
        gone = {o["index"] for o in here if o.get("dropped")}
        kept = [r for i, r in enumerate(records) if i not in gone]
        here = [o for o in here if o["index"] not in gone]
        hashes = [leaf_hash(epoch_prefix(leaf_file.HEADER.unpack(head)[3], epoch), r) for r in kept]
        for opening in here:
            opening["index"] = kept.index(bytes.fromhex(opening["record"]))
        proofs = inclusion_proofs(hashes, len(hashes), [o["index"] for o in here])
        for opening in here:
            opening["proof"] = [p.hex() for p in proofs[opening["index"]]]
        others = [o for o in self.worker(party)["openings"] if o["epoch"] != epoch]
        self.worker(party)["openings"] = sorted([*others, *here], key=lambda o: (o["epoch"], o["index"]))
        self.leaves[party][epoch] = (head, kept)
        self.statement(party, epoch).update(root=tree_root(hashes).hex(), leaves=len(kept), opened=len(here))

    def sign(self) -> None:
        """Sign everything of the parties' own again, in order, so that each of them contradicts itself nowhere."""
        history = History(sid_of(self.target.policy.sid_job, Coord(0, 0, 0, 0)))
        for epoch in range(EPOCHS):
            digests = {}
            for party in self.parties:
                data = self.statement(party, epoch)
                true = self.target.json["workers"][party]["roots"][epoch]["statement"]
                if self.heads and data["head"] == true["head"]:
                    data["head"] = history.head.hex()
                    for peer in data["seen"]:
                        if int(peer) in self.parties:
                            data["seen"][peer] = self.statement(int(peer), epoch - 1)["root"]
                signed = sign_root(pod_identity(party, 0), RootStatement.from_json(data))
                self.worker(party)["roots"][epoch] = signed.to_json()
            for party in range(3):
                digests[party] = Signed.from_json(self.worker(party)["roots"][epoch]).digest
            history.add(digests)
        for party in self.parties:
            self._sign_result(party, history.head)
        roots = [[bytes.fromhex(r["statement"]["root"]) for r in w["roots"]] for w in self.json["workers"]]
        coords = [Coord(0, p, 0, 0) for p in range(3)]
        self.json["epochs"], self.json["run_root"] = derived_roots(self.target.policy, coords, roots)
        hashes = {w["result"]["statement"]["result_hash"] for w in self.json["workers"]}
        self.json["result_hashes"] = sorted(hashes)

    def _sign_result(self, party: int, head: bytes) -> None:
        data = self.worker(party)["result"]["statement"]
        old = self.target.json["workers"][party]["result"]["statement"]
        if data["root"] == old["root"]:
            data["root"] = self.statement(party, EPOCHS - 1)["root"]
        if self.heads and data["head"] == old["head"]:
            data["head"] = head.hex()
            data["seen"].update(
                {p: self.statement(int(p), EPOCHS - 1)["root"] for p in data["seen"] if int(p) in self.parties}
            )
        made = ResultStatement(
            Coord(0, party, 0, 0),
            self.target.policy.sid_job,
            data["epochs"],
            bytes.fromhex(data["root"]),
            {int(p): bytes.fromhex(h) for p, h in data["seen"].items()},
            bytes.fromhex(data["head"]),
            data["steps"],
            data["values"],
            data["state_digests"],
        )
        self.worker(party)["result"] = sign_result(pod_identity(party, 0), made).to_json()

    def write(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.target.folder, self.folder)
        (self.folder / "proof_bundle.json").write_bytes(canonical(self.json))
        for party in self.parties:
            (there,) = self.folder.rglob(f"transcript_p{party}r0s0t0")
            (there / leaf_file.LEAVES).write_bytes(joined(self.leaves[party]))
            worker = self.worker(party)
            (there / leaf_file.ROOTS).write_bytes(b"".join(canonical(r) + b"\n" for r in worker["roots"]))
            (there / leaf_file.OPENINGS).write_bytes(b"".join(canonical(o) + b"\n" for o in worker["openings"]))
            (there / leaf_file.RESULT).write_bytes(canonical(worker["result"]) + b"\n")
            for other in set(self.parties) - {party}:  # they rewrite what they hold of each other, too
                lines = [json.loads(line) for line in (there / leaf_file.PEERS).read_bytes().splitlines()]
                roots = self.worker(other)["roots"]
                mine = f"p{other}r0s0t0"
                new = [roots[o["statement"]["epoch"]] if o["statement"]["coord"] == mine else o for o in lines]
                (there / leaf_file.PEERS).write_bytes(b"".join(canonical(o) + b"\n" for o in new))

    def rejected(self, what: str) -> set[str]:
        """The checks that fail, without and with the transcripts."""
        self.sign()
        assert canonical(self.json) != self.target.text, f"{what} changes nothing"
        self.write()
        alone = self.folder / "alone" / "proof_bundle.json"
        alone.parent.mkdir()
        shutil.copy(self.folder / "proof_bundle.json", alone)
        failed = set()
        for path, transcripts in ((alone, None), (self.folder / "proof_bundle.json", self.folder)):
            level = "with transcripts" if transcripts else "without transcripts"
            with pytest.raises((VerificationError, UnreadableError)) as found:
                verify(path, allowed_signers=self.target.pins, transcripts=transcripts)
                pytest.fail(f"accepted {level}: {what}")
            failed.add(found.value.check if isinstance(found.value, VerificationError) else found.value.what)
        return failed


@pytest.fixture
def forge(target: Target, tmp_path: Path) -> Callable[..., Forgery]:
    return lambda *parties: Forgery(target, tmp_path / "forged", parties)


def another(payload: bytes) -> bytes:
    """Another checkpoint than the one that was noted."""
    found = json.loads(payload)
    return canonical({**found, "sha256": "ab" * 32})


def test_the_genuine_run_signed_again_is_the_same(forge: Callable[..., Forgery], target: Target) -> None:
    """The forger's tools are exact: without a change they make the bundle that was there, byte for byte."""
    for parties in ((0,), (1, 2), (0, 1, 2)):
        forgery = forge(*parties)
        for party in parties:
            for epoch in range(EPOCHS):
                forgery.opened(party, epoch, kinds.CHECKPOINT, lambda payload: payload)
        forgery.sign()
        forgery.write()
        assert canonical(forgery.json) == target.text
        assert verify(forgery.folder, allowed_signers=target.pins).level == "transcripts"


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(
    "parties",
    [
        (0,),
        pytest.param((1,), marks=pytest.mark.ci(__file__)),
        pytest.param((2,), marks=pytest.mark.ci(__file__)),
        (0, 1),
        (1, 2),
    ],
)
def test_the_last_epochs_cannot_be_rewritten(forge: Callable[..., Forgery], parties: tuple[int, ...], k: int) -> None:
    """Other checkpoints, or none, in the last k epochs: leaves, proofs, roots, heads and the result all fit again."""
    for heads in (True, False):
        for change in (another, None):
            forgery = forge(*parties)
            forgery.heads = heads
            for party in parties:
                for epoch in range(EPOCHS - k, EPOCHS):
                    forgery.opened(party, epoch, kinds.CHECKPOINT, change)
            failed = forgery.rejected(f"P{parties} {change} in {k} epochs, heads {heads}")
            assert failed <= {"countersignature", "history"}, failed


@pytest.mark.parametrize(
    "party", [0, pytest.param(1, marks=pytest.mark.ci(__file__)), pytest.param(2, marks=pytest.mark.ci(__file__))]
)
def test_no_field_of_any_epoch_can_be_changed(forge: Callable[..., Forgery], target: Target, party: int) -> None:
    zero = "00" * 32
    for epoch in range(EPOCHS):
        old = target.json["workers"][party]["roots"][epoch]["statement"]
        changes: list[dict[str, Any]] = [
            {"root": zero},
            {"leaves": old["leaves"] + 1000},
            {"opened": old["opened"] + 1},
            {"pairs": dict.fromkeys(old["pairs"], zero)},
            {"values": {**old["values"], "loss": 0.0009765625}},
            {"values": {}} if old["values"] else {"values": {"loss": 0.5}},
            {"head": zero},
        ]
        if epoch:
            changes += [{"seen": {**old["seen"], peer: zero}} for peer in old["seen"]]
        for change in changes:
            forgery = forge(party)
            forgery.statement(party, epoch).update(change)
            forgery.rejected(f"P{party} epoch {epoch} {change}")


@pytest.mark.parametrize("party", [0, 1, 2])
def test_the_result_cannot_be_changed(forge: Callable[..., Forgery], target: Target, party: int) -> None:
    old = target.json["workers"][party]["result"]["statement"]
    zero = "00" * 32
    changes: list[dict[str, Any]] = [
        {"values": {**old["values"], "accuracy": 1.0}},
        {"state_digests": [zero] * 3},
        {"epochs": EPOCHS - 1},
        {"root": zero},
        {"head": zero},
        *[{"seen": {**old["seen"], peer: zero}} for peer in old["seen"]],
    ]
    for change in changes:
        forgery = forge(party)
        forgery.worker(party)["result"]["statement"].update(change)
        data = forgery.worker(party)["result"]["statement"]
        core = result_core(target.policy.sid_job, data["steps"], data["values"], data["state_digests"])
        forgery.opened(party, EPOCHS - 1, kinds.RESULT, lambda _, core=core: core)
        forgery.rejected(f"P{party} result {change}")


def test_a_rewritten_result_of_two_parties_is_held_against_the_third(
    forge: Callable[..., Forgery], target: Target
) -> None:
    for parties in ((0, 1), (0, 2), (1, 2)):
        forgery = forge(*parties)
        for party in parties:
            data = forgery.worker(party)["result"]["statement"]
            data["values"]["accuracy"] = 1.0
            core = result_core(target.policy.sid_job, data["steps"], data["values"], data["state_digests"])
            forgery.opened(party, EPOCHS - 1, kinds.RESULT, lambda _, core=core: core)
        forgery.rejected(f"{parties} accuracy 1.0")


# ---- what the parties hold of each other -----------------------------------------------------------------------------


def changed_lines(lines: list[bytes], other: list[bytes]) -> dict[str, list[bytes]]:
    """Ways to change a file of peers' statements."""
    spelled = json.dumps(json.loads(lines[0])).encode() + b"\n"
    return {
        "empty": [],
        "first missing": lines[1:],
        "last missing": lines[:-1],
        "doubled": [*lines, lines[0]],
        "extra": [*lines, b'{"verdict":"fine"}\n'],
        "own statement": [other[0], *lines[1:]],
        "own statement added": [*lines, other[0]],
        "spelled otherwise": [spelled, *lines[1:]],
        "not JSON": [*lines[:-1], b"x" * 4000 + b"\n"],
        "cut": [*lines[:-1], lines[-1][:-30]],
        "megabytes": [*lines, b" " * 3_000_000],
    }


def test_what_peers_signed_is_checked_line_by_line(target: Target, tmp_path: Path) -> None:
    shutil.copytree(target.folder, tmp_path / "run")
    for party in range(3):
        (folder,) = (tmp_path / "run").rglob(f"transcript_p{party}r0s0t0")
        path = folder / leaf_file.PEERS
        true, own = path.read_bytes(), (folder / leaf_file.ROOTS).read_bytes().splitlines(keepends=True)
        for name, lines in changed_lines(true.splitlines(keepends=True), own).items():
            path.write_bytes(b"".join(lines))
            with pytest.raises(VerificationError, match=r"peers: .*peers\.jsonl") as found:
                verify(tmp_path / "run")
            assert found.value.check == "peers", name
        signed = json.loads(true.splitlines()[0])
        signer = int(signed["statement"]["coord"][1])
        statement = RootStatement.from_json({**signed["statement"], "leaves": 1})
        forged = sign_root(pod_identity(signer, 0), statement)
        path.write_bytes(forged.line + b"".join(true.splitlines(keepends=True)[1:]))
        with pytest.raises(VerificationError, match="is not the one in the bundle"):
            verify(tmp_path / "run")
        path.unlink()
        with pytest.raises(UnreadableError, match=r"peers\.jsonl is not there"):
            verify(tmp_path / "run")
        path.write_bytes(true)
        assert verify(tmp_path / "run").level == "transcripts"


def test_no_bit_of_the_files_beside_the_leaves_can_change(target: Target, tmp_path: Path) -> None:
    shutil.copytree(target.folder, tmp_path / "run")
    tried = 0
    for name in (leaf_file.ROOTS, leaf_file.OPENINGS, leaf_file.RESULT, leaf_file.PEERS):
        for path in sorted((tmp_path / "run").rglob(name)):
            true = path.read_bytes()
            for at in range(0, len(true), max(1, len(true) // 12)):
                data = bytearray(true)
                data[at] ^= 1 << at % 8
                path.write_bytes(bytes(data))
                with pytest.raises((VerificationError, UnreadableError), match=path.name.replace(".", r"\.")):
                    verify(tmp_path / "run")
                tried += 1
            path.write_bytes(true)
    assert tried > 140
    assert verify(tmp_path / "run").level == "transcripts"
