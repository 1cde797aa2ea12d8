"""The evidence of three real workers: what is in it, that OpenSSH alone can check it, and that nothing of it can go."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mutation_kit import Target, every_value, random_bundles, random_transcripts, structured

from uvcc_engine.bench.launch.fleet import Fleet, Forker
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.mpc.comparisons.boolean import drelu_bits_protocol
from uvcc_engine.mpc.foundation.local import LocalPlane, LocalPlanes
from uvcc_engine.mpc.foundation.opening import open_ring_protocol
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import share_of, split
from uvcc_engine.plane.api import Buffer, Tag
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.transcript.leaves import leaf_file, payload_digests
from uvcc_engine.transcript.leaves.leaf import SENT, Leaf
from uvcc_engine.transcript.leaves.store import TranscriptStore
from uvcc_engine.transcript.proof.verifier import verify
from uvcc_engine.transcript.signing import sshsig

JOB = PrivateJob(steps=3, batch=8, test_rows=20, checkpoint_every=1)
EPOCHS = JOB.steps + 1
RANDOM_BUNDLE, RANDOM_TRANSCRIPT = 1200, 1000


def run_fleet(folder: Path, forker: Forker, job: PrivateJob) -> Path:
    """Three workers train; returns the bundle of their evidence, transcripts beside it."""
    fleet = Fleet(folder / "fleet", forker, job, Topology())
    fleet.launch()
    assert set(fleet.wait().values()) == {0}, fleet.logs()
    assert fleet.verified(folder / "evidence").level == "transcripts"
    return folder / "evidence" / "proof_bundle.json"


@pytest.fixture(scope="module")
def target(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(run_fleet(tmp_path_factory.mktemp("run"), forker, JOB))


def leaves(target: Target) -> list[tuple[int, int, Leaf]]:
    """(party, epoch, leaf) of the whole run."""
    found = []
    for name, path in target.paths.items():
        for file, block in leaf_file.blocks(path):
            found += [(int(name[12]), block.epoch, Leaf.unpack(r)) for r in leaf_file.records(file, block)]
    return found


# ---- what is in it -------------------------------------------------------------------------------------------------


def test_every_event_of_a_real_training_is_a_leaf(target: Target) -> None:
    """By party: shares opened, products shared again, dealt masks, inputs, checkpoints, the policy, the result."""
    found = Counter((p, kinds.NAMES[leaf.kind]) for p, _, leaf in leaves(target))
    for party in range(3):
        for kind in ("OPEN", "RESHARE", "DEALER"):
            assert found[party, kind] >= JOB.steps, (party, kind, found)
        assert found[party, "CHECKPOINT"] == JOB.steps
        assert {kind: found[party, kind] for kind in ("INPUT", "POLICY", "RESULT")} == {
            "INPUT": 1,
            "POLICY": 1,
            "RESULT": 1,
        }
    when = {
        kinds.NAMES[leaf.kind]: epoch for _, epoch, leaf in leaves(target) if leaf.kind in (kinds.INPUT, kinds.RESULT)
    }
    assert when == {"INPUT": 0, "RESULT": EPOCHS - 1}


def test_every_message_was_noted_where_it_left_and_where_it_came(target: Target) -> None:
    ends = Counter(
        (epoch, leaf.key[:3], leaf.src, leaf.dst, leaf.kind, leaf.digest)
        for _, epoch, leaf in leaves(target)
        if leaf.src != leaf.dst
    )
    assert len(ends) > 100
    assert set(ends.values()) == {2}


def test_every_epoch_is_finalised_with_its_count_and_signed_by_all(target: Target) -> None:
    counted = Counter((party, epoch) for party, epoch, _ in leaves(target))
    for party, worker in enumerate(target.json["workers"]):
        stated = {r["statement"]["epoch"]: r["statement"]["leaves"] for r in worker["roots"]}
        assert stated == {epoch: counted[party, epoch] for epoch in range(EPOCHS)}


class Noted(LocalPlane):
    """A local plane with a transcript, as the live one has."""

    def __init__(self, inner: LocalPlane, store: TranscriptStore) -> None:
        super().__init__(inner.wire, inner.party)
        self.store = store

    def send(self, dst: int, tag: Tag, payload: Buffer) -> None:
        self.store.record(0, dst, tag, payload)
        super().send(dst, tag, payload)

    def recv(self, src: int, tag: Tag) -> memoryview:
        found = super().recv(src, tag)
        self.store.record(1, src, tag, found)
        return found


def test_bits_and_chunks_are_leaves_too(tmp_path: Path) -> None:
    """No model here shares bits anew: a protocol that does, and one whose message has chunks."""
    three, sid = LocalPlanes(3), b"s" * 32
    many = payload_digests.CHUNK // 8 + 1000
    numbers = split(torch.arange(700.0), 16, random.Random(1).randbytes)
    large = split(torch.zeros(many), 16, random.Random(2).randbytes)

    def body(rt: Runtime) -> list[Leaf]:
        peers = {p: bytes([p + rt.party]) * 32 for p in range(3) if p != rt.party}
        store = TranscriptStore(
            tmp_path / str(rt.party), party=rt.party, sid_sub=sid, own_key=bytes(32), pair_keys=peers
        )
        rt.plane = Noted(three.planes[rt.party], store)
        store.begin_epoch(0)
        rt.begin_epoch(0)
        rt.run(drelu_bits_protocol(rt, share_of(numbers, rt.party)))
        rt.run(open_ring_protocol(rt, share_of(large, rt.party)))
        store.finalize_epoch()
        store.close()
        return [
            Leaf.unpack(r)
            for f, b in leaf_file.blocks(tmp_path / str(rt.party) / leaf_file.LEAVES)
            for r in leaf_file.records(f, b)
        ]

    found = three.run_three(body)
    for kind in (kinds.RESHARE, kinds.OPEN, kinds.DEALER):
        sent, received = (
            sum(leaf.kind == kind and leaf.direction == d for one in found for leaf in one) for d in (0, 1)
        )
        assert sent == received > 0, kinds.NAMES[kind]
    chunks = [leaf for one in found for leaf in one if leaf.chunk == 1]
    assert {leaf.size for leaf in chunks} == {8 * many - payload_digests.CHUNK}
    assert Counter(leaf.direction for leaf in chunks)[SENT] == len(chunks) // 2 > 0


# ---- by other hands ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_openssh_alone_checks_policy_roots_and_result(target: Target, tmp_path: Path) -> None:
    allowed, signature = tmp_path / "allowed_signers", tmp_path / "signature"
    sshsig.write_allowed_signers(allowed, target.pins)

    def holds(who: str, namespace: str, text: bytes, armored: str) -> bool:
        signature.write_text(armored)
        words = ["ssh-keygen", "-Y", "verify", "-f", str(allowed), "-I", who, "-n", namespace, "-s", str(signature)]
        return subprocess.run(words, input=text, capture_output=True).returncode == 0

    def plain(value: object) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

    tried = 0
    for party, worker in enumerate(target.json["workers"]):
        signed = [("uvcc-policy", target.json["policy"], target.json["policy_signatures"][str(party)])]
        signed += [("uvcc-root", r["statement"], r["signature"]) for r in worker["roots"]]
        signed.append(("uvcc-result", worker["result"]["statement"], worker["result"]["signature"]))
        for namespace, statement, armored in signed:
            assert holds(f"P{party}", namespace, plain(statement), armored)
            tried += 1
        assert not holds(f"P{(party + 1) % 3}", "uvcc-policy", plain(signed[0][1]), signed[0][2])
        assert not holds(f"P{party}", "uvcc-root", plain(signed[0][1]), signed[0][2])
        assert not holds(f"P{party}", "uvcc-result", plain({**signed[-1][1], "steps": 1}), signed[-1][2])
    assert tried == 3 * (1 + EPOCHS + 1)


@pytest.mark.parametrize("program", ["uvcc_engine.cli", "uvcc_console.cli.main"])
def test_an_auditor_needs_no_torch(target: Target, tmp_path: Path, program: str) -> None:
    allowed = tmp_path / "allowed_signers"
    sshsig.write_allowed_signers(allowed, target.pins)
    lean = Path(__file__).resolve().parents[2] / "lean"
    code = f"import sys; from {program} import main; sys.exit(main())"
    words = [sys.executable, "-c", code, "verify", str(target.bundle), "--allowed-signers", str(allowed)]
    env = os.environ | {"PYTHONPATH": str(lean)}
    required = subprocess.run([*words, "--require", "pinned,transcripts"], env=env, capture_output=True, text=True)
    assert required.returncode not in (1, 2), required.stdout + required.stderr
    target.bundle.write_bytes(target.text.replace(b'"steps":', b'"stepz":', 1))
    try:
        assert subprocess.run(words, env=env, capture_output=True).returncode in (1, 2)
    finally:
        target.bundle.write_bytes(target.text)


# ---- falsified -----------------------------------------------------------------------------------------------------


def test_some_falsifications_of_a_real_run(target: Target) -> None:
    """A few hundred here; thousands, and all structured ones, are tried by hand (below)."""
    random_bundles(target, random.Random(1), 60)
    random_transcripts(target, random.Random(2), 60)
    assert sum(target.failed.values()) >= 115  # a few draws change nothing
    assert verify(target.bundle, allowed_signers=target.pins).level == "transcripts"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_falsifications_of_a_real_run(
    target: Target, forker: Forker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = Target(run_fleet(tmp_path, forker, replace(JOB, seed=8)))
    before = sum(target.failed.values())
    random_bundles(target, random.Random(3), RANDOM_BUNDLE)
    random_transcripts(target, random.Random(4), RANDOM_TRANSCRIPT)
    at_random = sum(target.failed.values()) - before
    values, changes = every_value(target), structured(target, foreign)
    assert at_random >= 2000
    assert values + changes > 5000
    assert verify(target.bundle, allowed_signers=target.pins).level == "transcripts"
    with capsys.disabled():
        print(f"\nrejected: {at_random} at random, {values} values of the bundle, {changes} structured")
        print(dict(target.failed))
