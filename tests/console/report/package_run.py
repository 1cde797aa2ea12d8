"""A finished run with its smoke, as an operator hands it over: journal, two phases, artifacts, signed manifest."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from report_run import RUN, make_run

from uvcc_console.report import collector
from uvcc_console.report.artifacts import write_artifacts
from uvcc_console.report.handoff import write_handoff
from uvcc_console.report.record import RunRecord
from uvcc_console.report.verify import run_verify
from uvcc_engine.bench.work.rehearsal import rehearse
from uvcc_engine.transcript.signing.sshsig import write_allowed_signers


@contextmanager
def home(folder: Path) -> Iterator[None]:
    """Another data folder for a while."""
    before = os.environ.get("UVCC_HOME")
    os.environ["UVCC_HOME"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["UVCC_HOME"]
        else:
            os.environ["UVCC_HOME"] = before


def make_home(folder: Path) -> Path:
    """A data folder with one finished run; returns the run's folder."""
    with home(folder):
        run_dir = folder / "runs" / RUN
        make_run(run_dir)
        smoke = run_dir / "artifacts" / "smoke"
        smoke.mkdir()
        rehearse(smoke, steps=1, ops=1, nonce="22" * 32)
        for party in range(3):
            (smoke / f"pod{party}").rename(smoke / f"p{party}r0")
        for phase in ("smoke", "full"):
            here = run_dir / "artifacts" / phase
            shutil.rmtree(here / "identity")  # private keys are no part of a package
            for party in range(3):
                for name in ("policy.json", "policy_signatures.json"):
                    shutil.copy(here / name, here / f"p{party}r0" / name)
        collector.private_key()
        write_artifacts(run_dir)
        write_handoff(run_dir)
        collector.seal(run_dir)
        return run_dir


@dataclass(frozen=True)
class Package:
    """A run of this operator; ``signers`` is what an auditor brings along."""

    run_dir: Path
    signers: Path

    @property
    def artifacts(self) -> Path:
        return self.run_dir / "artifacts"

    def pinned(self, *more: str) -> int:
        """Exit code of verifying the whole run with the auditor's pins."""
        return run_verify([str(self.run_dir), "--allowed-signers", str(self.signers), *more])


def copy_of(made: Path, folder: Path) -> Package:
    """A package of one's own in a new data folder. The collector's key comes along."""
    shutil.copytree(made.parent.parent, folder)
    run_dir = folder / "runs" / made.name
    return Package(run_dir, pins_of(run_dir))


def pins_of(run_dir: Path) -> Path:
    """A file beside ``runs`` with the keys of a run's three parties and of its collector: an auditor's."""
    folder = run_dir.parents[1]
    with home(folder):
        keys = RunRecord.load(run_dir).pins()
        write_allowed_signers(folder / "auditors_signers", keys, collector.public_line())
    return folder / "auditors_signers"


def said(capsys: pytest.CaptureFixture[str]) -> Mapping[str, str]:
    """What was printed: ``out``, ``err``, and the first line of ``out``."""
    text = capsys.readouterr()
    return {"out": text.out, "err": text.err, "first": text.out.partition("\n")[0]}
