"""Dated evidence: a real time-stamping service on loopback, and one that lies."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from package_run import Package, home
from time_authority import Authority, authority

from uvcc_console.cli.main import main
from uvcc_console.report.timestamps import check, check_url, stamp
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UnreadableError, VerificationError


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Authority]:
    with authority(tmp_path_factory.mktemp("tsa") / "a") as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "policy.json").write_text('{"steps":3}')
    return tmp_path


def test_a_stamp_holds_for_this_file_and_this_authority(service: Authority, folder: Path) -> None:
    answer = asyncio.run(stamp(folder / "policy.json", service.url))
    assert answer.name == "policy.json.tsr"
    (found,) = check(folder, service.certificate)
    assert found.text.startswith("policy.json existed at 20")
    words = ["-data", "policy.json", "-in", "policy.json.tsr", "-CAfile", str(service.certificate)]
    done = subprocess.run(["openssl", "ts", "-verify", *words], cwd=folder, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    (folder / "policy.json").write_text('{"steps":4}')
    with pytest.raises(VerificationError, match=r"policy.json.tsr does not hold"):
        check(folder, service.certificate)


def test_only_the_hash_leaves_and_a_stamp_that_is_there_stays(service: Authority, folder: Path) -> None:
    before = len(service.asked)
    first = asyncio.run(stamp(folder / "policy.json", service.url)).read_bytes()
    assert len(service.asked) == before + 1
    assert b"steps" not in service.asked[-1]
    assert asyncio.run(stamp(folder / "policy.json", service.url)).read_bytes() == first
    assert len(service.asked) == before + 1


def test_another_authority_is_not_believed(service: Authority, folder: Path, tmp_path: Path) -> None:
    asyncio.run(stamp(folder / "policy.json", service.url))
    with authority(tmp_path / "other") as other, pytest.raises(VerificationError, match="does not hold"):
        check(folder, other.certificate)


ANSWERS = {"nothing": b"", "a text": b"no stamp", "too much": bytes(100_000), "a refusal": b"0\x05\x30\x03\x02\x01\x02"}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_is_no_stamp_is_said_and_not_kept(name: str, folder: Path, tmp_path: Path) -> None:
    with authority(tmp_path / "liar") as liar:
        liar.answer = ANSWERS[name]
        with pytest.raises((UnreachableError, UnreadableError)):
            asyncio.run(stamp(folder / "policy.json", liar.url))
    assert not (folder / "policy.json.tsr").exists()


def test_a_stamp_of_something_else_is_refused(service: Authority, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    other = asyncio.run(stamp(tmp_path / "other.json", service.url)).read_bytes()
    with authority(tmp_path / "liar") as liar:
        liar.answer = other
        with pytest.raises(UnreachableError, match="stamped something else"):
            asyncio.run(stamp(folder / "policy.json", liar.url))
        liar.answer, liar.status = None, 500
        with pytest.raises(UnreachableError, match="answers 500"):
            asyncio.run(stamp(folder / "policy.json", liar.url))
    with pytest.raises(UnreachableError, match="does not answer"):
        asyncio.run(stamp(folder / "policy.json", liar.url))  # it is closed by now


@pytest.mark.parametrize("url", ["ftp://x/", "file:///etc/passwd", "http://u:p@host/", "https://", "x\x1b[2J"])
def test_an_address_is_one(url: str) -> None:
    with pytest.raises(ConfigError, match="no time-stamping service"):
        check_url(url)


@pytest.mark.ci("tests/console/report/test_public_log.py")
def test_a_package_is_dated_and_says_when(
    service: Authority, package: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(package.artifacts / "smoke")
    (package.artifacts / "MANIFEST.json").unlink()
    (package.artifacts / "MANIFEST.json.sig").unlink()
    out = tmp_path / "run.zip"
    with home(package.run_dir.parent.parent):
        words = ["--format", "zip", "--output", str(out), "--timestamp", service.url]
        assert main(["package", package.run_dir.name, *words]) == 0
        assert main(["timestamp", str(out), "--authority", str(service.certificate)]) == 0
        said = capsys.readouterr().out
        assert "full: policy.json existed at 20" in said
        assert "full: proof_bundle.json existed at 20" in said
        assert main(["timestamp", str(out), "--authority", str(service.certificate), "--json"]) == 0
        assert set(json.loads(capsys.readouterr().out)["full"]) == {"policy.json", "proof_bundle.json"}
        assert main(["verify", str(out), "--allowed-signers", str(package.signers)]) == 0
