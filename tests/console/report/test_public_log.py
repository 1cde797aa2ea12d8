"""A public log on loopback: what it shows of a run, and every way in which it can lie, each refused by name."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from package_run import Package, home
from transparency_log import GARBAGE, Log, transparency_log

from uvcc_console.cli.main import main
from uvcc_console.report import collector
from uvcc_console.report.publishing import PublicLog
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UnreadableError, UvccError, VerificationError
from uvcc_engine.transcript.proof import public_log as entries
from uvcc_engine.transcript.proof.bundle import read_bundle


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with transparency_log(tmp_path / "log") as made:
        yield made


@pytest.fixture
def folder(package: Package, tmp_path: Path) -> Iterator[Path]:
    """The folder of a phase that was verified, with a data folder of one's own."""
    with home(package.run_dir.parent.parent):
        yield Path(shutil.copytree(package.artifacts / "full", tmp_path / "full"))


def before(log: Log, folder: Path) -> None:
    asyncio.run(PublicLog(log.url).enter_policy(folder))


def after(log: Log, folder: Path) -> None:
    asyncio.run(PublicLog(log.url).enter_run(folder))


def verdict(log: Log, folder: Path) -> tuple[entries.Entered, entries.Entered]:
    bundle = read_bundle(folder / "proof_bundle.json")
    key = entries.LogKey.from_pem(log.pem.read_bytes(), "the log's key")
    return entries.check_phase(folder, bundle.policy.hash.hex(), bundle.run_root, key)


def test_a_policy_and_a_run_are_entered_and_hold_offline(log: Log, folder: Path) -> None:
    before(log, folder)
    log.bodies += [b"others", b"go on", b"meanwhile"]
    after(log, folder)
    log.bodies.clear()  # nobody is asked
    policy, run = verdict(log, folder)
    assert policy.at <= run.at
    assert (policy.head.size, run.head.size) == (2, 6)
    assert policy.signer == run.signer == collector.public_line()


def test_only_hashes_leave_and_an_entry_that_is_there_stays(log: Log, folder: Path) -> None:
    before(log, folder)
    after(log, folder)
    asked = len(log.asked)
    before(log, folder)
    after(log, folder)
    assert len(log.asked) == asked == 2
    bundle = read_bundle(folder / "proof_bundle.json")
    sent = b"".join(log.asked)
    assert len(sent) < 3000
    for secret in (bundle.policy.owner, bundle.policy.parties[0].provider, bundle.policy.nonce):
        assert secret.encode() not in sent


def test_an_answer_that_was_lost_is_fetched(log: Log, folder: Path) -> None:
    log.lie = "loses the answer"
    with pytest.raises(UnreachableError, match="answers 503"):
        before(log, folder)
    log.lie = ""
    before(log, folder)
    after(log, folder)
    assert len(log.entries) == 2
    verdict(log, folder)


LIES = {
    "drops": "it was dropped",
    "signs no time": "did not sign when it took up",
    "signs no head": "not signed by the log's key",
    "garbage": "not JSON",
    "nothing": "not JSON",
    "too much": "more than an entry",
    "two entries": "is not one entry",
    "half an entry": "an object is missing",
}


@pytest.mark.parametrize(
    "lie", [pytest.param(value, marks=pytest.mark.ci(__file__) if n % 2 else ()) for n, value in enumerate(LIES)]
)
def test_an_entry_that_does_not_hold_is_refused_by_name_and_not_kept(lie: str, log: Log, folder: Path) -> None:
    log.lie = lie
    with pytest.raises(UvccError, match=LIES[lie]) as refused:
        before(log, folder)
    assert isinstance(refused.value, (UnreadableError, UnreachableError) if lie in GARBAGE else VerificationError)
    assert not (folder / entries.POLICY_ENTRY).exists()


def test_a_log_with_two_histories_is_found_out_when_the_run_is_entered(log: Log, folder: Path) -> None:
    before(log, folder)
    log.bodies += [b"others"]
    log.lie = "equivocates"
    with pytest.raises(VerificationError, match="two histories: its 2 entries before the run"):
        after(log, folder)
    assert not (folder / entries.RUN_ENTRY).exists()


def test_a_log_that_forgets_an_entry_is_found_out_when_the_run_is_entered(log: Log, folder: Path) -> None:
    log.lie = "forgets"
    before(log, folder)  # it shows the entry in its tree, this once
    log.lie = ""
    with pytest.raises(VerificationError, match="two histories"):
        after(log, folder)


def test_a_log_that_begins_anew_between_the_two_is_said(log: Log, folder: Path) -> None:
    before(log, folder)
    log.origin = "log.example - 1" + log.origin[-18:]
    with pytest.raises((VerificationError, UnreachableError)):
        after(log, folder)


@pytest.mark.parametrize(("skew", "word"), [(5000.0, "after"), (-5000.0, "before")])
def test_a_log_that_dates_wrongly_is_refused(skew: float, word: str, log: Log, folder: Path) -> None:
    log.skew_s = skew
    with pytest.raises(VerificationError, match=f"(49..|50..) s {word} this machine's clock"):
        before(log, folder)


def test_a_log_that_answers_too_late_is_unreachable(log: Log, folder: Path) -> None:
    log.lie = "never answers"
    with pytest.raises(UnreachableError, match=r"did not answer within|does not answer"):
        asyncio.run(PublicLog(log.url, str(log.pem), wait_s=0.3).enter_policy(folder))


def test_nobody_there_is_unreachable(folder: Path, tmp_path: Path) -> None:
    with transparency_log(tmp_path / "gone") as log:
        pass
    with pytest.raises(UnreachableError, match="does not answer"):
        before(log, folder)


def test_another_logs_key_is_not_believed(log: Log, folder: Path, tmp_path: Path) -> None:
    before(log, folder)
    after(log, folder)
    with transparency_log(tmp_path / "other") as other:
        with pytest.raises(VerificationError, match="another log than the one whose key is expected"):
            verdict(other, folder)
        with pytest.raises(VerificationError, match="another log"):
            asyncio.run(PublicLog(log.url, str(other.pem)).enter_policy(_without(folder)))


def _without(folder: Path) -> Path:
    (folder / entries.POLICY_ENTRY).unlink()
    return folder


def test_entries_of_another_run_do_not_hold(log: Log, folder: Path, package: Package, tmp_path: Path) -> None:
    other = Path(shutil.copytree(package.artifacts / "smoke", tmp_path / "smoke"))
    for each in (folder, other):
        before(log, each)
        after(log, each)
    verdict(log, other)
    kept = (folder / entries.RUN_ENTRY).read_bytes()
    shutil.copy(other / entries.RUN_ENTRY, folder)
    with pytest.raises(VerificationError, match="is an entry of something else"):
        verdict(log, folder)
    (folder / entries.RUN_ENTRY).write_bytes(kept)
    verdict(log, folder)
    (folder / entries.RUN_ENTRY).unlink()
    with pytest.raises(VerificationError, match=r"has no proof_bundle.json.rekor.json"):
        verdict(log, folder)


@pytest.mark.ci(__file__)
def test_no_falsified_entry_is_accepted(log: Log, folder: Path) -> None:
    log.bodies += [b"%d" % n for n in range(9)]
    before(log, folder)
    log.bodies += [b"others"] * 5
    after(log, folder)
    rng = random.Random(22)
    for name in (entries.POLICY_ENTRY, entries.RUN_ENTRY):
        path = folder / name
        genuine = path.read_bytes()
        found = json.loads(genuine)
        for _ in range(250):
            data = bytearray(genuine)
            at = rng.randrange(len(data))
            how = rng.randrange(3)
            if how == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif how == 1:
                del data[at : at + rng.randrange(1, 40)]
            else:
                data[at:at] = rng.randbytes(3)
            path.write_bytes(bytes(data))
            try:
                verdict(log, folder)
            except (VerificationError, UnreadableError):
                continue
            # nothing but the signatures' own spellings, which change nothing of what they show
            assert json.loads(bytes(data))["entry"]["body"] == found["entry"]["body"]
            assert json.loads(bytes(data))["entry"]["integratedTime"] == found["entry"]["integratedTime"]
        path.write_bytes(genuine)
    verdict(log, folder)


@pytest.mark.parametrize("url", ["ftp://x/", "file:///etc/passwd", "http://u:p@host/", "https://", "x\x1b[2J"])
def test_an_address_is_one(url: str) -> None:
    with pytest.raises(ConfigError, match="no transparency log"):
        PublicLog(url)


@pytest.mark.ci(__file__)
def test_a_package_is_entered_and_verified_by_its_reader(
    log: Log, package: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.zip"
    shutil.rmtree(package.artifacts / "smoke")  # the journal of this run tells of no smoke
    for name in ("MANIFEST.json", "MANIFEST.json.sig"):
        (package.artifacts / name).unlink()
    with home(package.run_dir.parent.parent):
        words = ["--format", "zip", "--output", str(out), "--log", log.url, "--log-key", str(log.pem)]
        assert main(["package", package.run_dir.name, *words]) == 0
        pinned = ["verify", str(out), "--allowed-signers", str(package.signers)]
        assert main(pinned) == 0
        capsys.readouterr()
        assert main([*pinned, "--log-key", str(log.pem)]) == 0
        said = capsys.readouterr().out
        assert "logged       phase full: policy 20" in said
        assert "policy.json.rekor.json" in (package.artifacts / "index.html").read_text()
        assert main([*pinned, "--log-key", str(log.pem), "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["logged"]) == 1
        with transparency_log(tmp_path / "other") as other:
            assert main([*pinned, "--log-key", str(other.pem)]) == 1
        assert "another log than the one whose key is expected" in capsys.readouterr().err


def test_a_run_that_was_never_entered_is_said(
    log: Log, package: Package, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["verify", str(package.run_dir), "--allowed-signers", str(package.signers)]
    assert main([*words, "--log-key", str(log.pem)]) == 1
    assert "has no policy.json.rekor.json: it was never entered" in capsys.readouterr().err
    (tmp_path / "key").write_text("no key")
    assert main([*words, "--log-key", str(tmp_path / "key")]) == 2
