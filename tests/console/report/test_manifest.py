"""The signed manifest of everything handed over: what changed is named, and nothing changed is signed again."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from package_run import Package, said

from uvcc_console.core import paths
from uvcc_console.report import collector
from uvcc_console.report.artifacts import write_artifacts
from uvcc_console.report.figures import write_figures
from uvcc_console.report.handoff import write_handoff
from uvcc_console.report.logbundle import write_bundle
from uvcc_engine.contract.errors import UnreadableError, VerificationError
from uvcc_engine.transcript.proof import manifest, standalone_verify

READ_BY_PEOPLE = (
    "run_full.log",
    "run_full.jsonl",
    "dp_layout.json",
    "handoff.md",
    "full/policy.json",
    "full/policy_signatures.json",
    "full/audit_bundle.json",
    "full/dp_roots.json",
    "full/dp_matrix.md",
    "full/roots_by_coord.json",
    "full/allowed_signers",
    "full/p0r0/training.csv",
    "full/p0r0/events.jsonl",
    "full/p0r0/run.info",
    "full/p1r0/policy.json",
    "full/p2r0/worker_p2r0s0t0.log",
    "full/p1r0/transcript_p1r0s0t0/peers.jsonl",
    "full/p1r0/transcript_p1r0s0t0/open.bin",
    "smoke/proof_bundle.json",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(value, marks=pytest.mark.ci(__file__) if n % 2 else ()) for n, value in enumerate(READ_BY_PEOPLE)],
)
def test_a_changed_file_is_named(name: str, package: Package, capsys: pytest.CaptureFixture[str]) -> None:
    path = package.artifacts / name
    data = path.read_bytes()
    for changed in (data + b"\n", data[:-1], data[:-1] + bytes([data[-1] ^ 1]), b""):
        path.write_bytes(changed)
        assert package.pinned() in (1, 2)
        assert Path(name).name.partition(".")[0] in said(capsys)["err"] or "smoke" in name
    path.unlink()
    assert package.pinned() in (1, 2)
    path.write_bytes(data)
    assert package.pinned() == 0


def test_added_renamed_and_swapped_files_are_named(package: Package, capsys: pytest.CaptureFixture[str]) -> None:
    root = package.artifacts
    (root / "full/extra.txt").write_text("accuracy 100 %")
    assert package.pinned() == 1
    assert "full/extra.txt was added" in said(capsys)["err"]
    (root / "full/extra.txt").unlink()
    (root / "run_full.log").rename(root / "run_full.txt")
    assert package.pinned() == 1
    assert "run_full.log is gone; run_full.txt was added" in said(capsys)["err"]
    (root / "run_full.txt").rename(root / "run_full.log")
    one, two = root / "full/p0r0/worker_p0r0s0t0.log", root / "full/p1r0/run.info"
    a, b = one.read_bytes(), two.read_bytes()
    one.write_bytes(b)
    two.write_bytes(a)
    assert package.pinned() == 1
    assert "worker_p0r0s0t0.log was changed" in said(capsys)["err"]
    one.write_bytes(a)
    two.write_bytes(b)
    two.unlink()
    two.symlink_to(one)
    assert package.pinned() == 1
    assert "full/p1r0/run.info is a link" in said(capsys)["err"]
    two.unlink()
    os.mkfifo(two)
    assert package.pinned() == 1
    assert "full/p1r0/run.info is a FIFO" in said(capsys)["err"]


def test_half_a_manifest_or_one_by_another_key(
    package: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = package.artifacts
    text, signature = (root / manifest.NAME).read_bytes(), (root / manifest.SIGNATURE).read_text()
    (root / manifest.SIGNATURE).unlink()
    assert package.pinned() == 1
    assert "MANIFEST.json.sig is missing" in said(capsys)["err"]
    for changed in (signature.replace("A", "B", 1), signature + " ", "", "-----BEGIN SSH SIGNATURE-----\n"):
        (root / manifest.SIGNATURE).write_text(changed)
        assert package.pinned() in (1, 2)
    (root / manifest.SIGNATURE).write_text(signature)
    (root / manifest.NAME).write_bytes(text.replace(b'"bytes":', b'"bytes": ', 1))
    assert package.pinned() == 1
    (root / manifest.NAME).write_bytes(text)
    assert package.pinned() == 0
    collector.key_file().unlink()  # somebody else changes a file and signs it all with a key of his own
    (root / "handoff.md").write_text("all criteria met")
    collector.seal(package.run_dir)
    said(capsys)
    assert package.pinned() == 1
    assert "collector is ssh-ed25519" in said(capsys)["err"]
    package.signers.write_text("".join(package.signers.read_text().splitlines(True)[:-1]))  # no line of the collector
    assert package.pinned() == 6
    assert "nothing says whose key" in said(capsys)["out"]


def edit(change: Callable[[object], object]) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps(change(json.loads(data))).encode()


def changed_at(*way: str | int, to: object) -> Callable[[bytes], bytes]:
    def change(data: object) -> object:
        at = data
        for step in way[:-1]:
            at = at[step]  # type: ignore[index]
        at[way[-1]] = to  # type: ignore[index]
        return data

    return edit(change)


LIES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "policy": ("full/policy.json", lambda d: d.replace(b'"lr":0.1', b'"lr":0.2')),
    "a pod's policy": ("full/p1r0/policy.json", lambda d: d.replace(b"north", b"south")),
    "signatures": ("full/policy_signatures.json", edit(lambda d: {**d, "0": d["1"]})),  # type: ignore[dict-item,index]
    "audit": ("full/audit_bundle.json", changed_at("global_root_hex", to="0x" + "00" * 32)),
    "dp_roots": ("full/dp_roots.json", changed_at("epochs", 1, "global_root_hex", to="0x" + "00" * 32)),
    "matrix": ("full/dp_matrix.md", lambda d: d.replace(b"Replicas: 1", b"Replicas: 8")),
    "by_coord": ("full/roots_by_coord.json", changed_at(1, "epoch_root_hex", to="0x" + "00" * 32)),
    "accuracy": ("full/p0r0/result.json", changed_at("values", "accuracy", to=0.9999)),
    "steps": ("full/p0r0/result.json", changed_at("steps", to=300)),
    "signers": (
        "full/allowed_signers",
        lambda d: d.replace(b"P0 ", b"P9 ").replace(b"P1 ", b"P0 ").replace(b"P9 ", b"P1 "),
    ),
    "loss": ("full/p2r0/training.csv", lambda d: d + b"3,0.01,0.1,0,100\n"),
    "a loss that nobody signed": ("full/p2r0/training.csv", lambda d: d + b"9,0.01,0.1,0,100\n"),
    "roots": ("full/p2r0/transcript_p2r0s0t0/roots.jsonl", lambda d: b"".join(d.splitlines(True)[:-1])),
    "openings": ("full/p2r0/transcript_p2r0s0t0/openings.jsonl", lambda d: d[:-1] + b" \n"),
    "worker's result": ("full/p2r0/transcript_p2r0s0t0/result.json", lambda d: d + b"\n"),
    "smoke": ("smoke/p1r0/policy.json", lambda d: d.replace(b"north", b"south")),
}


ONLY_OURS = ("dp_matrix.md", "roots_by_coord.json", "allowed_signers")
"""What our verifier reads beyond section 11 of EVIDENCE.md."""


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.replace(b"step,", b"step,step,", 1),
        lambda d: d.replace(b"toks_per_s", b"loss", 1),
        lambda d: d.replace(b",100\n", b",100,7\n", 1),
    ],
    ids=["two steps", "two losses", "a cell too many"],
)
def test_a_table_that_two_readers_could_read_differently_is_no_table_to_either_verifier(
    change: Callable[[bytes], bytes], package: Package
) -> None:
    path = package.artifacts / "full/p0r0/training.csv"
    before = path.read_bytes()
    path.write_bytes(change(before))
    assert path.read_bytes() != before
    collector.seal(package.run_dir)
    assert package.pinned() == 2
    assert standalone_verify.main([str(package.artifacts), "--allowed-signers", str(package.signers)]) == 2


def test_what_nobody_signs_of_a_table_may_be_anything_to_both_verifiers(package: Package) -> None:
    """Section 11 holds the column of losses to what was signed; a trainer's other columns are its own."""
    path = package.artifacts / "full/p0r0/training.csv"
    before = path.read_bytes()
    path.write_bytes(before.replace(b",100\n", b",n/a\n", 1))
    assert path.read_bytes() != before
    collector.seal(package.run_dir)
    assert package.pinned() == 0
    assert standalone_verify.main([str(package.artifacts), "--allowed-signers", str(package.signers)]) == 0


@pytest.mark.parametrize("lie", LIES)
def test_a_collector_who_lies_about_what_was_signed_is_named(
    lie: str, package: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    """The manifest is signed again with the true key over the falsified file."""
    name, change = LIES[lie]
    path = package.artifacts / name
    if name.endswith("p0r0/result.json"):  # as a worker writes it
        shutil.copy(package.artifacts / "full/p0r0/transcript_p0r0s0t0/result.json", path)
        signed = json.loads(path.read_text())
        path.write_text(json.dumps({**signed["statement"], "signature": signed["signature"], "run": "x", "ts": 1.5}))
        collector.seal(package.run_dir)
        assert package.pinned() == 0
    before = path.read_bytes()
    path.write_bytes(change(before))
    assert path.read_bytes() != before
    collector.seal(package.run_dir)
    assert package.pinned() == 1
    err = said(capsys)["err"]
    if Path(name).name not in ONLY_OURS:
        assert standalone_verify.main([str(package.artifacts), "--allowed-signers", str(package.signers)]) == 1
    assert err.startswith(("NOT VERIFIED  derived: ", "NOT VERIFIED  transcript files: "))
    assert Path(name).name in err


@pytest.mark.ci(__file__)
def test_verbs_that_add_files_renew_the_manifest(package: Package) -> None:
    write_handoff(package.run_dir)
    write_figures(package.run_dir)
    write_bundle(package.run_dir)
    write_artifacts(package.run_dir)
    assert package.pinned() == 0
    listed = json.loads((package.artifacts / manifest.NAME).read_text())["files"]
    names = {f["path"] for f in listed}
    assert {"handoff.md", "all_logs_explained.md", "figs/loss.csv"} <= names
    explained = (package.artifacts / "all_logs_explained.md").read_text()
    assert "\n| handoff.md |" in explained
    assert "\n| MANIFEST.json |" not in explained


@pytest.mark.parametrize("verb", [write_handoff, write_figures, write_bundle, write_artifacts])
def test_a_changed_file_is_not_signed_again(verb: Callable[[Path], object], package: Package) -> None:
    before = (package.artifacts / manifest.NAME).read_bytes()
    (package.artifacts / "full/p0r0/training.csv").write_text("step,loss\n1,0\n")
    with pytest.raises(VerificationError, match=r"full/p0r0/training\.csv was changed"):
        verb(package.run_dir)
    assert (package.artifacts / manifest.NAME).read_bytes() == before
    assert package.pinned() == 1


def test_what_is_changed_while_a_verb_runs_is_not_signed_either(package: Package) -> None:
    with pytest.raises(VerificationError, match=r"run_full\.log was changed"), collector.renewing(package.run_dir) as w:
        (package.artifacts / "new.md").write_text("new")
        w.append(package.artifacts / "new.md")
        (package.artifacts / "run_full.log").write_text("something else\n")
    assert package.pinned() == 1


def test_a_run_that_goes_on_withdraws_its_manifest(package: Package) -> None:
    (package.artifacts / "handoff.md").write_text("x")
    with pytest.raises(VerificationError, match=r"handoff\.md"):
        collector.reopen(package.run_dir)
    assert manifest.is_there(package.artifacts)
    write_text = (package.artifacts / manifest.NAME).read_bytes()
    assert write_text
    collector.seal(package.run_dir)
    collector.reopen(package.run_dir)
    assert not manifest.is_there(package.artifacts)
    with collector.renewing(package.run_dir):
        pass
    assert not manifest.is_there(package.artifacts)


def test_a_link_is_not_sealed(package: Package) -> None:
    (package.artifacts / "link").symlink_to("/etc/hostname")
    with pytest.raises(UnreadableError, match="is a link"):
        collector.seal(package.run_dir)


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_openssh_alone_checks_the_manifest(package: Package) -> None:
    root = package.artifacts
    words = ["ssh-keygen", "-Y", "verify", "-f", "full/allowed_signers", "-I", "collector", "-n", "uvcc-manifest"]
    words += ["-s", manifest.SIGNATURE]
    text = (root / manifest.NAME).read_bytes()
    assert subprocess.run(words, cwd=root, input=text, capture_output=True, check=False).returncode == 0
    assert subprocess.run(words, cwd=root, input=text + b" ", capture_output=True, check=False).returncode != 0
    as_party = [*words[:5], "full/allowed_signers", *words[6:]]
    as_party[as_party.index("collector")] = "P0"
    assert subprocess.run(as_party, cwd=root, input=text, capture_output=True, check=False).returncode != 0


def test_the_key_is_born_once_and_is_nobody_elses_to_read(tmp_path: Path) -> None:
    assert collector.public_line() == ""
    one, two = collector.private_key(), collector.private_key()
    assert one.private_bytes_raw() == two.private_bytes_raw()
    path = paths.config_dir() / collector.KEY_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    path.chmod(0o644)
    with pytest.raises(UnreadableError, match="readable by others"):
        collector.private_key()
    path.chmod(0o600)
    path.write_text("no key")
    with pytest.raises(UnreadableError, match="cannot use the collector's key"):
        collector.public_line()
