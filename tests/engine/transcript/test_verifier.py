"""The verifier's command, certificate, comparison of reruns, bundle without transcripts, and the published schema."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from uvcc_engine.bench.work.rehearsal import Rehearsal, rehearse
from uvcc_engine.contract.errors import UnreadableError, VerificationError
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.transcript.proof.bundle import SCHEMA, assemble_folder
from uvcc_engine.transcript.proof.cli import main
from uvcc_engine.transcript.proof.verifier import verify
from uvcc_engine.transcript.signing import sshsig


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    return rehearse(tmp_path_factory.mktemp("run"), topology=Topology(2, 1, 2, 1), steps=2, ops=2)


@pytest.fixture
def signers(run: Rehearsal, tmp_path: Path) -> Path:
    sshsig.write_allowed_signers(tmp_path / "allowed", {f"P{p.party}": p.public.ed25519 for p in run.policy.parties})
    return tmp_path / "allowed"


def test_certificate(run: Rehearsal, signers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run.folder), "--allowed-signers", str(signers)]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0] == f"identities pinned by {signers}"
    assert text.splitlines()[1].startswith("VERIFIED     3 epochs")
    for wanted in (
        run.policy.sid_job.hex(),
        run.policy.hash.hex(),
        "loss = 0.25",
        "north/eu",
        "global root",
        "public seed",
    ):
        assert wanted in text
    assert main([str(run.bundle), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["complete"], found["missing"]) == (False, False, ["pinned"])
    assert found["verdict"] == "HOLDS AS FAR AS CHECKED"
    assert found["level"] == "transcripts"
    assert found["epochs"] == 3
    assert found["global_root"] == json.loads(run.bundle.read_text())["epochs"][-1]["global_root"]
    assert len(found["parties"]) == 3
    assert any("pin them" in w for w in found["warnings"])


def test_exit_codes_and_first_failure(run: Rehearsal, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere.json")]) == 2
    assert "UNREADABLE" in capsys.readouterr().err
    data = json.loads(run.bundle.read_text())
    data["run_root"] = "ab" * 32
    (tmp_path / "b.json").write_text(json.dumps(data, sort_keys=True, separators=(",", ":")))
    assert main([str(tmp_path / "b.json"), "--json"]) == 1
    out = capsys.readouterr()
    found = json.loads(out.out)
    assert found["check"] == "run root"
    assert "ab" * 32 in found["what"]
    assert json.loads(run.bundle.read_text())["run_root"] in found["what"]
    assert "NOT VERIFIED" in out.err


def test_bundle_alone_says_that_leaves_were_not_seen(run: Rehearsal, tmp_path: Path) -> None:
    shutil.copy(run.bundle, tmp_path / "proof_bundle.json")
    found = verify(tmp_path)
    assert found.level == "bundle"
    assert any("not recomputed" in w for w in found.warnings)
    assert verify(tmp_path, transcripts=run.folder).level == "transcripts"


def test_rerun_is_compared(run: Rehearsal, tmp_path: Path) -> None:
    same = rehearse(tmp_path / "same", topology=Topology(2, 1, 2, 1), steps=2, ops=2)
    assert same.bundle.read_bytes() == run.bundle.read_bytes()
    assert verify(run.bundle, against=same.bundle).run_root == verify(same.bundle).run_root
    other = rehearse(tmp_path / "other", topology=Topology(2, 1, 2, 1), steps=2, ops=2, nonce="22" * 32)
    with pytest.raises(VerificationError, match="sid_job") as found:
        verify(run.bundle, against=other.bundle)
    assert other.policy.sid_job.hex() in found.value.what
    differs = rehearse(tmp_path / "differs", topology=Topology(2, 1, 2, 1), steps=2, ops=3)
    with pytest.raises(VerificationError, match="global root of epoch 0"):
        verify(run.bundle, against=differs.bundle)


def test_unfinished_run_cannot_be_assembled(tmp_path: Path) -> None:
    made = rehearse(tmp_path, steps=2, ops=1)
    (tmp_path / "pod1/transcript_p1r0s0t0/result.json").unlink()
    with pytest.raises(UnreadableError, match=r"p1r0s0t0.*result\.json"):
        assemble_folder(tmp_path)
    shutil.rmtree(tmp_path / "pod1")
    with pytest.raises(UnreadableError, match="no transcript of p1r0s0t0"):
        assemble_folder(tmp_path)
    assert made.bundle.exists()


def test_bundle_follows_its_published_schema(run: Rehearsal) -> None:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    data = json.loads(run.bundle.read_text())
    validator.validate(data)
    for change in ({"status": "OK"}, {"run_root": "xyz"}, {"workers": [{}]}, {"policy": {}}, {"policy_signatures": {}}):
        assert not validator.is_valid({**data, **change}), change


def test_verifying_needs_neither_torch_nor_asyncssh(run: Rehearsal) -> None:
    code = (
        "import sys; from uvcc_engine.transcript.proof.cli import main; rc = main(sys.argv[1:]);"
        "assert not {'torch', 'numpy', 'asyncssh', 'textual'} & set(sys.modules); sys.exit(rc)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run.bundle)], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
