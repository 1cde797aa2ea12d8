"""Where a job starts that goes on from another's checkpoint: read strictly, cited by transcripts, checked by verify."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from uvcc_engine.bench.work import rehearsal
from uvcc_engine.contract.errors import ConfigError, VerificationError
from uvcc_engine.contract.job.migration import Migration, record_hash
from uvcc_engine.transcript.exchange import evidence
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.transcript.proof.verifier import verify
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.migration_plan import migration_after
from uvcc_engine.transcript.terms.policy import Policy

START = Migration("a" * 64, 4, "b" * 64, "c" * 64, (1,))
IDENTITIES = [Identity(hashlib.sha256(b"o%d" % n).digest(), hashlib.sha256(b"x%d" % n).digest()) for n in range(6)]


def policy(identities: list[Identity] = IDENTITIES[:3], steps: int = 7, start: Migration | None = START) -> Policy:
    made = rehearsal.make_policy(identities, rehearsal.Topology(), steps)
    job = dict(made.job) if start is None else {**made.job, "start": start.to_json()}
    return Policy.from_json({**made.to_json(), "job": job})


def test_an_origin_reads_back_and_the_policy_binds_it() -> None:
    assert Migration.from_json(START.to_json()) == START
    assert policy().migration == START
    assert policy().first_step == 4
    assert policy(start=None).first_step == 0
    assert policy().hash != policy(start=replace(START, commit="d" * 64)).hash


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("step", 0, "job.start.step"),
        ("step", True, "job.start.step"),
        ("of", "A" * 64, "job.start.of"),
        ("commit", 7, "job.start.commit"),
        ("root", "", "job.start.root"),
        ("restored", [3], "job.start.restored"),
        ("restored", [1, 1], "job.start.restored"),
        ("restored", [0, 2], "handed to identities"),
        ("restored", None, "job.start.restored"),
        ("other", 1, "unknown field .other"),
    ],
)
def test_what_is_no_origin_is_refused(field: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Migration.from_json({**START.to_json(), field: value})


def test_there_must_be_steps_left() -> None:
    with pytest.raises(ConfigError, match="nothing left"):
        policy(steps=4)


def test_a_successor_remembers_its_lineage_and_takes_no_second_party_from_strangers() -> None:
    old = policy()
    record = {"sid_job": old.sid_job.hex(), "step": 5, "parties": []}
    same = migration_after(old, record, old.parties)
    assert same == Migration(old.hash.hex(), 5, record_hash(record), START.root, (1,))
    moved = policy([IDENTITIES[0], IDENTITIES[4], IDENTITIES[2]]).parties
    assert migration_after(old, record, moved).restored == (1,)
    both = policy([IDENTITIES[3], IDENTITIES[1], IDENTITIES[2]]).parties
    with pytest.raises(ConfigError, match=r"parties \[0, 1\]"):
        migration_after(old, record, both)
    for wrong in ({"sid_job": "0" * 64}, {"step": 7}, {"step": "5"}):
        with pytest.raises(ConfigError, match="not of a checkpoint of this policy"):
            migration_after(old, {**record, **wrong}, old.parties)


def test_the_transcript_cites_the_checkpoint_and_verify_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = rehearsal.make_policy

    def with_start(identities: Any, topology: Any, steps: int, nonce: str = "00" * 32) -> Policy:
        plain = made(identities, topology, steps + START.step, nonce)
        return Policy.from_json({**plain.to_json(), "job": {**plain.job, "start": START.to_json()}})

    monkeypatch.setattr(rehearsal, "make_policy", with_start)
    found = verify(rehearsal.rehearse(tmp_path / "whole", steps=3).bundle)
    assert (found.epochs, found.level) == (4, "transcripts")
    opened = evidence.WorkerEvidence.__init__
    for name, words in (("none", "START leaf"), ("other", "opening")):

        def init(self: evidence.WorkerEvidence, *args: Any, name: str = name) -> None:
            opened(self, *args)
            kept = [leaf for leaf in self._local if leaf[0] != kinds.START]
            self._local = kept if name == "none" else [*kept, (kinds.START, 0, b"{}")]

        monkeypatch.setattr(evidence.WorkerEvidence, "__init__", init)
        with pytest.raises(VerificationError, match=words):
            verify(rehearsal.rehearse(tmp_path / name, steps=3).bundle)


def test_a_job_from_its_beginning_may_not_cite_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = evidence.WorkerEvidence.__init__

    def init(self: evidence.WorkerEvidence, *args: Any) -> None:
        opened(self, *args)
        self._local.append((kinds.START, 0, b""))

    monkeypatch.setattr(evidence.WorkerEvidence, "__init__", init)
    with pytest.raises(VerificationError, match="START leaf"):
        verify(rehearsal.rehearse(tmp_path, steps=2).bundle)
