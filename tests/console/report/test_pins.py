"""Whose keys ``verify`` expects, what its words and exit codes say, and that no folder under test can choose them."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from package_run import Package, said
from report_run import RUN, make_run

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.report import collector
from uvcc_console.report.verify import own_run, pins_of, run_verify
from uvcc_engine.transcript.proof.package import UNPINNED


def test_a_bundle_cannot_bring_its_own_pins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three made-up keys, and a journal beside and above the bundle that names them."""
    forged = tmp_path / "mail" / RUN
    make_run(forged)
    full = forged / "artifacts" / "full"
    shutil.copy(forged / "journal.sqlite", full / "journal.sqlite")
    for path in (full, full / "proof_bundle.json", forged, forged / "artifacts"):
        assert run_verify([str(path)]) == 3
        told = said(capsys)
        assert told["first"] == UNPINNED
        assert "HOLDS AS FAR AS CHECKED" in told["out"]
        assert "VERIFIED" not in told["out"]
    assert run_verify([str(full), "--json"]) == 3
    found = json.loads(said(capsys)["out"])
    assert (found["ok"], found["complete"], found["missing"][0]) == (False, False, "pinned")
    assert found["pins"] == UNPINNED


def test_links_do_not_make_a_run_ones_own(package: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forged = tmp_path / "mail" / "forged"
    make_run(forged)
    runs = package.run_dir.parent
    (runs / "linked").symlink_to(forged)
    shutil.rmtree(package.artifacts)
    package.artifacts.symlink_to(forged / "artifacts")
    for path in (runs / "linked", runs / "linked/artifacts/full", package.artifacts, package.artifacts / "full"):
        assert own_run(path) is None
        assert run_verify([str(path)]) == 3
        assert said(capsys)["first"] == UNPINNED
    assert run_verify([str(package.run_dir)]) == 2  # its artifacts are a link
    (package.run_dir / "journal.sqlite").unlink()
    (package.run_dir / "journal.sqlite").symlink_to(forged / "journal.sqlite")
    assert own_run(package.run_dir) is None


def test_the_journal_of_ones_own_run_pins(package: Package, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (package.run_dir, package.artifacts, package.artifacts / "full"):
        assert run_verify([str(path)]) == 0
        told = said(capsys)
        assert told["first"] == f"identities pinned by the journal of this operator's run {RUN}"
        assert told["out"].splitlines()[1].startswith("VERIFIED     phase full: 4 epochs")
    assert "also holds" not in told["out"]
    found = pins_of(package.run_dir)
    assert found is not None
    signers = found.of("full")
    assert signers is not None
    assert {s.principals for s in signers.signers} == {"P0", "P1", "P2", "collector"}
    journal = Journal(package.run_dir / "journal.sqlite")
    other = next(s.key for s in signers.signers if s.principals == "P1")
    journal.append(
        ev.PodChanged(pod="p0r0", party=0, replica=0, provider="local", state="agent", identity=other),
        ev.PhaseStarted(phase="full", engine_run=f"{RUN}.full", steps=3, sid_job="", attempt=1),
    )
    journal.close()
    assert run_verify([str(package.artifacts / "full")]) == 1
    assert "identity: P0 is" in said(capsys)["err"]


def test_a_pod_that_was_replaced_later_does_not_change_whom_an_earlier_phase_is_by(
    package: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal(package.run_dir / "journal.sqlite")
    journal.append(ev.PodChanged(pod="p0r0", party=0, replica=0, provider="local", state="agent", identity="x y z"))
    journal.close()
    assert run_verify([str(package.artifacts / "full")]) == 0


def test_named_pins(package: Package, capsys: pytest.CaptureFixture[str]) -> None:
    assert package.pinned() == 0
    told = said(capsys)
    assert told["first"] == f"identities pinned by {package.signers}"
    assert "also holds   phase smoke: 2 epochs" in told["out"]
    policy = package.artifacts / "full/policy.json"
    assert run_verify([str(package.run_dir), "--policy", str(policy)]) == 6  # who collected it, a policy does not say
    told = said(capsys)
    assert (
        told["first"]
        == f"identities pinned by {policy}, WHICH LIES IN THE FOLDER UNDER TEST: whoever made it chose the keys"
    )
    assert "NOT CHECKED  manifest: nothing says whose key" in told["out"]


def only_bundle(package: Package, folder: Path) -> Path:
    folder.mkdir()
    shutil.copy(package.artifacts / "full/proof_bundle.json", folder)
    return folder


def test_each_shortcoming_has_its_code(package: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pins = ["--allowed-signers", str(package.signers)]
    alone = only_bundle(package, tmp_path / "alone")
    assert run_verify([str(alone), *pins]) == 4
    assert "NOT CHECKED  transcripts" in said(capsys)["out"]
    (package.artifacts / "MANIFEST.json").unlink()
    (package.artifacts / "MANIFEST.json.sig").unlink()
    assert package.pinned() == 6
    assert "has no MANIFEST.json" in said(capsys)["out"]
    shutil.rmtree(package.artifacts / "full")
    assert package.pinned("--json") == 5
    found = json.loads(said(capsys)["out"])
    assert (found["missing"], found["phase"], found["verdict"]) == (
        ["full", "manifest"],
        "smoke",
        "HOLDS AS FAR AS CHECKED",
    )
    assert run_verify([str(alone)]) == 3  # unpinned and without transcripts: the smaller code


def test_a_smoke_is_verified_on_purpose_only(package: Package, capsys: pytest.CaptureFixture[str]) -> None:
    assert package.pinned("--phase", "smoke") == 0
    assert "VERIFIED     phase smoke: 2 epochs" in said(capsys)["out"]
    shutil.rmtree(package.artifacts / "full")
    collector.seal(package.run_dir)
    assert package.pinned() == 5
    assert package.pinned("--phase", "smoke") == 0
    assert package.pinned("--phase", "full") == 2
    assert run_verify([str(package.artifacts / "smoke"), "--allowed-signers", str(package.signers)]) == 0


def test_what_is_required_must_be_there(package: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    everything = "pinned,transcripts,full,manifest"
    assert package.pinned("--require", everything) == 0
    alone = only_bundle(package, tmp_path / "alone")
    for word in everything.split(","):
        said(capsys)
        assert run_verify([str(alone), "--require", word]) == 1
        told = said(capsys)
        assert told["err"].startswith(f"NOT VERIFIED  required: {word}: ")
        assert "HOLDS" not in told["out"]
    assert package.pinned("--require", "everything") == 2
    assert "cannot require" in said(capsys)["err"]


AS_NOBODY = """
import contextlib, io, os, sys
from uvcc_engine.transcript.proof.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    main(sys.argv[1:])  # imports all it needs while it may
os.seteuid(65534)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not read a folder")
@pytest.mark.parametrize("closed", ["p1r0", "p1r0/transcript_p1r0s0t0"])
def test_a_folder_that_cannot_be_listed_is_a_shortcoming(closed: str, package: Package) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        shutil.copytree(package.artifacts / "full", folder / "full")
        shutil.copy(package.signers, folder / "pins")
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        (folder / "full" / closed).chmod(0o000)
        words = [str(folder / "full"), "--allowed-signers", str(folder / "pins"), "--json"]
        done = subprocess.run([sys.executable, "-c", AS_NOBODY, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 4, done.stderr
        found = json.loads(done.stdout)
        assert found["missing"] == ["transcripts"]
        assert f"{closed} of phase" in found["why"]["transcripts"] or f"{closed} cannot" in found["why"]["transcripts"]


@pytest.mark.parametrize("damage", ["text", "cut", "empty", "locked", "fields", "no table"])
def test_a_damaged_journal_is_said_to_be_unreadable(
    damage: str, package: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = package.run_dir / "journal.sqlite"
    db = sqlite3.connect(journal, isolation_level=None)
    db.execute("PRAGMA journal_mode=DELETE")
    if damage == "text":
        journal.write_text("this is no journal")
    elif damage == "cut":
        journal.write_bytes(journal.read_bytes()[:5000])
    elif damage == "empty":
        journal.write_bytes(b"")
    elif damage == "locked":
        db.execute("BEGIN EXCLUSIVE")
    elif damage == "no table":
        db.execute("DROP TABLE events")
    else:
        db.execute("INSERT INTO events(ts, source, kind, data) VALUES (1, 'x', 'pod', '[1, 2]')")
    assert run_verify([str(package.run_dir)]) == 2
    told = said(capsys)
    assert told["err"].startswith("UNREADABLE  cannot read the journal")
    assert "--allowed-signers" in told["err"]
    assert package.pinned() == 0  # whoever brings pins along needs no journal
    db.close()
