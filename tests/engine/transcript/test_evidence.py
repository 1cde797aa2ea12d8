"""What a worker does for its evidence: signatures, resume, agreement, and runs that a party tries to falsify."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from evidence_kit import STEPS, Workers, World, end_epoch

from uvcc_engine.bench.work.rehearsal import (
    CODE_HASH,
    VALUES,
    agree,
    exchange,
    rehearse,
    revealed,
    state_digests,
)
from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreadableError
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.exchange.agreement import ForkError
from uvcc_engine.transcript.exchange.evidence import WorkerEvidence
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.leaf import Leaf
from uvcc_engine.transcript.proof.verifier import verify
from uvcc_engine.transcript.signed.statements import RootStatement, Signed, sign_root
from uvcc_engine.transcript.signing import sshsig
from uvcc_engine.transcript.signing.identity import Identity


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def test_result_dictionary(world: World) -> None:
    world.open()
    world.steps(range(STEPS))
    for w in world.workers.values():
        w.begin(STEPS)
    for w in world.workers.values():
        w.outcome(VALUES, state_digests())
        with pytest.raises(ConfigError, match="not agreed with"):
            w.result()
    agree(world.workers)
    found = [w.result() for w in world.workers.values()]
    core = {
        "sid_job": world.policy.sid_job.hex(),
        "steps": STEPS,
        "values": VALUES,
        "state_digests": state_digests(),
    }
    wanted = hashlib.sha256(b"UVCC_RESULT_V1" + canonical(core)).hexdigest()
    assert {f["result_hash"] for f in found} == {wanted}
    assert found[0]["values"] == VALUES
    assert found[0]["signature"].startswith("-----BEGIN SSH SIGNATURE-----\n")
    json.dumps(found[0])


def test_halted_and_resumed_run_has_the_same_evidence(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    straight, broken = World(tmp_path / "a"), World(tmp_path / "b")
    straight.open()
    straight.steps(range(STEPS))
    straight.end()
    broken.open()
    broken.steps(range(3))
    broken.open(resume=1)
    broken.steps(range(1, 2))
    broken.open(resume=2)
    broken.steps(range(2, STEPS))
    broken.end()
    for p in range(3):
        assert straight.roots(p) == broken.roots(p)
        names = (leaf_file.LEAVES, leaf_file.OPENINGS, leaf_file.RESULT)
        one, two = (w.folder / f"pod{p}" / f"transcript_p{p}r0s0t0" for w in (straight, broken))
        for name in names:
            assert (one / name).read_bytes() == (two / name).read_bytes()
    straight.close()
    broken.close()


def test_epoch_must_be_agreed_before_the_next_is_signed(world: World) -> None:
    w = world.open()
    for e in w.values():
        e.begin(0)
        e.finish(0, revealed(world.policy, 0))
        e.begin(1)
    w[0].check(1, w[1].agreement(0))
    with pytest.raises(ConfigError, match="not agreed with P2"):
        w[0].finish(1, revealed(world.policy, 1))


def test_only_what_the_policy_allows(world: World, tmp_path: Path) -> None:
    w = world.open()
    with pytest.raises(ConfigError, match="sealed inputs"):
        w[0].input("00" * 32)
    with pytest.raises(ConfigError, match="does not reveal"):
        w[0].outcome({"weights": 1.0}, state_digests())
    stranger = Identity.create(tmp_path / "stranger")
    with pytest.raises(ConfigError, match="does not name"):
        WorkerEvidence.open(tmp_path, stranger, world.policy, Coord(0, 0, 0, 0))
    with pytest.raises(ConfigError, match="P1"):
        WorkerEvidence.open(tmp_path, world.identities[1], world.policy, Coord(0, 0, 0, 0))
    with pytest.raises(ConfigError, match="outside"):
        WorkerEvidence.open(tmp_path, world.identities[0], world.policy, Coord(1, 0, 0, 0))
    with pytest.raises(ConfigError, match="peers"):
        WorkerEvidence.open(tmp_path, world.identities[0], world.policy, Coord(0, 0, 0, 0), {1: stranger.public})


def test_resume_needs_its_signed_roots(world: World) -> None:
    world.open()
    world.steps(range(2))
    world.close()
    path = world.folder / "pod0" / "transcript_p0r0s0t0" / leaf_file.ROOTS
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(UnreadableError, match="lacks epoch 1"):
        world.open(resume=2)


# ---- parties that cheat --------------------------------------------------------------------------------------------


def start(world: World, epochs: int = 1) -> Workers:
    world.open()
    world.steps(range(epochs))
    for w in world.workers.values():
        w.begin(epochs)
    return world.workers


def test_altered_share_is_attributed_to_the_pair_and_named(world: World) -> None:
    """P1 sends P0 another share than its transcript says."""
    w = start(world)
    exchange(w, 1)
    w[1].recorder.record(0, 0, (1, 5, 7, kinds.OPEN), b"the share")
    w[0].recorder.record(1, 1, (1, 5, 7, kinds.OPEN), b"an altered share")
    end_epoch(w, 1)
    for me, peer in ((0, 1), (1, 0)):
        with pytest.raises(ForkError, match=r"epoch 1: P\d and P\d recorded different") as fork:
            w[me].check(peer, w[peer].agreement(me))
        assert (fork.value.party, fork.value.epoch) == (peer, 1)
    named = w[0].locate(1, w[1].dispute(0))
    assert "OPEN P1->P0 (stream 5, op 7)" in named
    assert "(16 B) and " in named
    w[2].check(0, w[0].agreement(2))


def test_omitted_leaf_is_attributed(world: World) -> None:
    w = start(world)
    exchange(w, 1)
    w[2].recorder.record(0, 1, (1, 3, 4, kinds.RESHARE), b"sent, says P2")
    end_epoch(w, 1)
    with pytest.raises(ForkError):
        w[1].check(2, w[2].agreement(1))
    assert "RESHARE P2->P1 (stream 3, op 4) is missing at P1" in w[1].locate(2, w[2].dispute(1))
    assert w[0].locate(1, w[1].dispute(0)) == ""


def _forged(world: World, party: int, body: bytes, root: bytes) -> bytes:
    """``party`` signs another root than the one in ``body``."""
    data = json.loads(body)
    statement = RootStatement.from_json(data["root"]["statement"]).to_json()
    changed = RootStatement.from_json({**statement, "root": root.hex()})
    data["root"] = sign_root(world.identities[party], changed).to_json()
    return canonical(data)


def test_different_roots_to_the_two_peers_convict_the_signer(world: World) -> None:
    """P1 shows P2 another root than P0: found out in the next epoch, with both signatures."""
    w = start(world)
    exchange(w, 1)
    end_epoch(w, 1)
    w[0].check(1, w[1].agreement(0))
    w[2].check(1, _forged(world, 1, w[1].agreement(2), bytes(32)))
    for a, b in ((0, 2), (2, 0), (1, 0), (1, 2)):
        w[a].check(b, w[b].agreement(a))
    for e in w.values():
        e.begin(2)
    end_epoch(w, 2)
    for me, peer in ((0, 2), (2, 0)):
        with pytest.raises(ProtocolError, match="P1 signed two statements for epoch 1") as found:
            w[me].check(peer, w[peer].agreement(me))
        assert found.value.party == 1


def test_a_false_witness_is_named_not_its_victim(world: World) -> None:
    """P2 claims that P1 showed it another root, without P1's signature."""
    w = start(world)
    end_epoch(w, 1)
    agree(w)
    for e in w.values():
        e.begin(2)
    end_epoch(w, 2)
    body = json.loads(w[2].agreement(0))
    body["third"]["statement"]["root"] = "00" * 32
    with pytest.raises(ProtocolError, match="P2 sent a root of p1r0s0t0 whose signature") as found:
        w[0].check(2, canonical(body))
    assert found.value.party == 2
    body["third"] = None
    with pytest.raises(ProtocolError, match="does not say") as found:
        w[0].check(2, canonical(body))
    assert found.value.party == 2


def test_a_party_cannot_change_its_word_after_a_resume(world: World) -> None:
    world.open()
    world.steps(range(3))
    w = world.open(resume=1)
    for e in w.values():
        e.begin(1)
    exchange(w, 1)
    end_epoch(w, 1)
    with pytest.raises(ProtocolError, match="signed two statements for epoch 1") as found:
        w[0].check(1, _forged(world, 1, w[1].agreement(0), bytes(32)))
    assert found.value.party == 1


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b'{"root":1,"third":null}', b'{"root":{},"third":null}', b"[" * 50_000, b"\xff"],
)
def test_nonsense_is_attributed_to_its_sender(world: World, body: bytes) -> None:
    w = start(world)
    end_epoch(w, 1)
    with pytest.raises(ProtocolError) as found:
        w[0].check(1, body)
    assert found.value.party == 1
    with pytest.raises(ProtocolError):
        w[0].locate(1, b"short")


def test_stale_foreign_and_unsigned_roots_are_refused(world: World) -> None:
    w = start(world)
    old = {p: w[p].agreement(0) for p in (1, 2)}
    end_epoch(w, 1)
    new = json.loads(w[1].agreement(0))
    other = json.loads(w[2].agreement(0))
    unsigned = {**new, "root": {**new["root"], "signature": other["root"]["signature"]}}
    for body, named in ((old[1], "epoch 0"), (canonical(other), "p2r0s0t0"), (canonical(unsigned), "signature")):
        with pytest.raises(ProtocolError, match=named) as found:
            w[0].check(1, body)
        assert found.value.party == 1


def test_a_different_result_is_named(world: World) -> None:
    world.open()
    world.steps(range(STEPS))
    w = world.workers
    for e in w.values():
        e.begin(STEPS)
    for p, e in w.items():
        e.outcome({**VALUES, "loss": 9.0} if p == 2 else VALUES, state_digests())
    agree(w)
    for e in w.values():
        e.result()
    w[0].check_closing(1, w[1].closing(0))
    with pytest.raises(ProtocolError, match="P2 has result") as found:
        w[0].check_closing(2, w[2].closing(0))
    assert found.value.party == 2


# ---- third parties -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_ssh_keygen_checks_roots_and_result(tmp_path: Path) -> None:
    made = rehearse(tmp_path)
    allowed = tmp_path / "allowed_signers"
    sshsig.write_allowed_signers(allowed, {f"P{p.party}": p.public.ed25519 for p in made.policy.parties})
    bundle = json.loads(made.bundle.read_text())
    for party, worker in enumerate(bundle["workers"]):
        for namespace, signed in (("uvcc-root", worker["roots"][1]), ("uvcc-result", worker["result"])):
            (tmp_path / "s.sig").write_text(signed["signature"])
            words = ["ssh-keygen", "-Y", "verify", "-f", str(allowed), "-I", f"P{party}", "-n", namespace]
            text = json.dumps(signed["statement"], sort_keys=True, separators=(",", ":")).encode()
            done = subprocess.run([*words, "-s", str(tmp_path / "s.sig")], input=text, capture_output=True)
            assert done.returncode == 0, done.stderr


def test_leaves_of_a_real_run_hide_their_payload(tmp_path: Path) -> None:
    """No digest of a one-byte message equals the hash of any one-byte payload."""
    made = rehearse(tmp_path)
    assert verify(made.bundle).level == "transcripts"
    plain = {hashlib.sha256(bytes([b])).digest() for b in range(256)}
    short = 0
    for path in tmp_path.rglob(leaf_file.LEAVES):
        for file, block in leaf_file.blocks(path):
            for record in leaf_file.records(file, block):
                leaf = Leaf.unpack(record)
                short += leaf.size == 1
                assert leaf.digest not in plain
    assert short > 10


def test_signed_line_is_the_signed_text(tmp_path: Path) -> None:
    made = rehearse(tmp_path)
    line = next(tmp_path.rglob(leaf_file.ROOTS)).read_bytes().splitlines()[0]
    signed = Signed.from_json(json.loads(line))
    assert signed.line == line + b"\n"
    assert made.policy.code_hash == CODE_HASH
