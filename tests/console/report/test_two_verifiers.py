"""``uvcc verify`` and a package's ``verify.py`` come to one verdict: over whom a reader's file names, over phases that
are not of one run, and over files that the collector signed again. Where they differ the specification says so.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from package_run import Package, said
from test_manifest import ONLY_OURS

from uvcc_console.report import collector
from uvcc_console.report.verify import run_verify
from uvcc_engine.bench.work import rehearsal
from uvcc_engine.transcript.proof import standalone_verify
from uvcc_engine.transcript.proof.input_attribution import OWNERS_FILE
from uvcc_engine.transcript.proof.package import OF_ONE_RUN
from uvcc_engine.transcript.signed import barriers, consents, proposals, roster
from uvcc_engine.transcript.signing import sshsig


def verdicts(package: Package, signers: Path) -> tuple[int, int]:
    """Exit codes of both verifiers over the same files."""
    ours = run_verify([str(package.run_dir), "--allowed-signers", str(signers)])
    return ours, standalone_verify.main([str(package.artifacts), "--allowed-signers", str(signers)])


def keys_of(package: Package) -> dict[str, str]:
    lines = (line.split() for line in package.signers.read_text().splitlines())
    return {words[0]: " ".join(words[-2:]) for words in lines}


def line_for(who: str, principals: str, key: str) -> str:
    """A line of the reader's file; of P0, P1 and P2 always the plain one."""
    return f"{principals if who == 'collector' else who} {key}\n"


# what stands before the collector's key -> what both say
PRINCIPALS: Mapping[str, int] = {
    "collector": 0,
    "*": 0,
    "c*": 0,
    "coll?ctor": 0,
    '"collector"': 0,
    '"me,collector"': 0,
    "  collector": 0,
    "collector\t": 0,
    "!collector,*": 6,
    "*,!collector": 6,
    "me": 6,
    "Collector": 6,
    "collector.": 6,
    "colle[c]tor": 6,
    "#collector": 6,
    "# me,collector": 6,
    'collector namespaces="uvcc-root"': 1,
    'collector valid-before="20200101"': 1,
}


@pytest.mark.parametrize(
    ("principals", "code"),
    [
        pytest.param(*value, marks=pytest.mark.ci(__file__) if n % 3 else ())
        for n, value in enumerate(PRINCIPALS.items())
    ],
)
def test_a_readers_file_names_the_collector_to_both_or_to_neither(
    principals: str, code: int, package: Package, tmp_path: Path
) -> None:
    """As OpenSSH reads it: the file is in OpenSSH's form, and ``*`` in it is everybody."""
    signers = tmp_path / "signers"
    signers.write_text("".join(line_for(who, principals, key) for who, key in keys_of(package).items()))
    assert verdicts(package, signers) == (code, code)


def test_a_key_of_everybodys_is_not_the_collectors_where_another_one_signed(package: Package, tmp_path: Path) -> None:
    signers, keys = tmp_path / "signers", keys_of(package)
    signers.write_text(
        "".join(f"{who} {key}\n" for who, key in keys.items() if who != "collector") + f"* {keys['P0']}\n"
    )
    assert verdicts(package, signers) == (1, 1)


def another_smoke(package: Package, seed: bytes) -> dict[str, str]:
    """In place of the smoke, that of another run: real keys, and the collector seals it. Returns its parties' keys."""
    smoke = package.artifacts / "smoke"
    shutil.rmtree(smoke)
    smoke.mkdir()
    made = rehearsal.rehearse(smoke, steps=1, ops=1, nonce="33" * 32, seed=seed)
    shutil.rmtree(smoke / "identity")
    for party in range(3):
        (smoke / f"pod{party}").rename(smoke / f"p{party}r0")
    collector.seal(package.run_dir)
    return {f"P{p}": one.public.ed25519 for p, one in enumerate(made.identities)}


def test_phases_by_different_keys_are_said_to_be_of_one_run_by_the_collector_only(
    package: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys of two runs in one file: a smoke of the one beside the full run of the other holds by itself."""
    others = another_smoke(package, b"another run")
    signers = tmp_path / "signers"
    signers.write_text("".join(f"{who} {key}\n" for of in (keys_of(package), others) for who, key in of.items()))
    assert run_verify([str(package.run_dir), "--allowed-signers", str(signers)]) == 0
    told = f"P0, P1, P2 signed the phases with different keys: {OF_ONE_RUN}"
    assert f"warning      {told}" in said(capsys)["out"]
    assert standalone_verify.main([str(package.artifacts), "--allowed-signers", str(signers)]) == 0
    assert told in said(capsys)["out"]
    assert verdicts(package, package.signers) == (1, 1)  # with the keys of the one run


def test_phases_by_the_same_keys_carry_no_such_warning(package: Package, capsys: pytest.CaptureFixture[str]) -> None:
    assert verdicts(package, package.signers) == (0, 0)
    assert OF_ONE_RUN not in said(capsys)["out"]


@pytest.mark.parametrize("apart", [{"proposal": "ab" * 32}, {"proposal": "cd" * 32, "attempt": 1}])
def test_phases_of_different_proposals_or_attempts_are_no_run(
    apart: dict[str, str | int],
    package: Package,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Domains of their own sign in every phase for which proposal and attempt it is: two of them are two runs."""
    genuine = rehearsal.make_policy
    full = package.artifacts / "full"

    def of_three(*args: object, **more: object) -> object:
        made = genuine(*args, **more)  # type: ignore[arg-type]
        data = made.to_json()
        data["inputs"] |= {"attempt": 0} | apart
        data["operation"] |= {"operators": "three"}
        return type(made).from_json(data)

    monkeypatch.setattr(rehearsal, "make_policy", of_three)
    another_smoke(package, b"rehearsal")
    if "attempt" in apart:  # the full phase is of three domains, too, of the same proposal
        monkeypatch.setattr(rehearsal, "make_policy", lambda *a, **k: replace(of_three(*a, **k), attempt=0))  # type: ignore[type-var]
        shutil.rmtree(full)
        full.mkdir()
        rehearsal.rehearse(full, steps=1, ops=1)
        shutil.rmtree(full / "identity")
        collector.seal(package.run_dir)
    said(capsys)
    assert verdicts(package, package.signers) == (1, 1)
    lines = said(capsys)["err"].splitlines()
    assert len(lines) == 2
    assert all("are of different proposals or attempts" in line for line in lines)


def test_a_file_that_grew_is_told_of_before_it_is_read(package: Package, capsys: pytest.CaptureFixture[str]) -> None:
    """To a terabyte of holes: hashing it took hours."""
    with (package.artifacts / "run_full.log").open("r+b") as file:
        file.truncate(1 << 40)
    assert verdicts(package, package.signers) == (1, 1)
    assert "run_full.log is no file of " in said(capsys)["err"]


OBEYED = "x\n\x1b[2J\x1b[H\x9b2JVERIFIED\r\u202e\u2028\udcff"


@pytest.mark.parametrize("where", ["a file", "a phase", "a table's column"])
def test_a_name_that_a_terminal_obeys_is_spelled_out_by_both(
    where: str, package: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    """A collector may call files what it likes: no name clears the auditor's screen, or writes a line of its own."""
    if where == "a file":
        (package.artifacts / OBEYED).write_text("")
    elif where == "a phase":
        (package.artifacts / "smoke").rename(package.artifacts / OBEYED[:-1])
    else:
        (package.artifacts / "full" / "p0r0" / "val.csv").write_text(f"step,{OBEYED[1:-1]}\n2,1\n")
        (package.artifacts / "MANIFEST.json").unlink()
        (package.artifacts / "MANIFEST.json.sig").unlink()
    assert set(verdicts(package, package.signers)) <= {1, 2}
    told = said(capsys)
    lines = f"{told['out']}{told['err']}".split("\n")
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith("VERIFIED") for line in lines)


def test_a_name_that_the_terminals_letters_lack_is_spelled_out(package: Package) -> None:
    (package.artifacts / "\u65e5\udcff\u00e9").write_text("")
    verifier = Path(standalone_verify.__file__)
    command = [sys.executable, "-I", "-X", "utf8=0", str(verifier), str(package.artifacts)]
    done = subprocess.run(command, capture_output=True, check=False, env={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"})
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    assert b"added or removed since it was signed: " in done.stderr
    shown = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    standalone_verify.say("\u65e5\u00e9", out=shown)
    shown.flush()
    assert shown.buffer.getvalue() == b"\\u65e5\xe9\n"  # type: ignore[attr-defined]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["missing", "pipe", "folder", "device", "huge", "link"])
def test_a_keys_file_that_cannot_be_read_says_nothing_about_the_run(
    kind: str, package: Package, tmp_path: Path
) -> None:
    """A path that was mistyped is unreadable, not a run that does not hold; a link is the reader's own affair."""
    signers = tmp_path / "signers"
    if kind == "pipe":
        os.mkfifo(signers)
    elif kind == "folder":
        signers.mkdir()
    elif kind == "huge":
        signers.write_text("#" * (1 << 20) + "\n" + package.signers.read_text())
    elif kind in ("device", "link"):
        signers.symlink_to("/dev/zero" if kind == "device" else package.signers)
    wanted = 0 if kind == "link" else 2
    assert verdicts(package, signers) == (wanted, wanted)


# ---- what each of them reads ---------------------------------------------------------------------------------------

SECTION = (Path(standalone_verify.__file__).parent / "EVIDENCE.md").read_text().partition("| what lies there |")[2]
TABLE = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in SECTION.partition("\n\n")[0].splitlines()[2:]
]
NAMES = re.compile(r"`([\w.-]+\.json[\w.]*|[\w.]+\.md|allowed_signers)`")
NAMED = {name: row for row in TABLE for name in NAMES.findall(row[0])}
FALSE = b'{"made": "up"}\n'


def test_the_table_names_what_only_uvcc_verify_reads() -> None:
    assert set(NAMED) >= {*ONLY_OURS, proposals.FILE, roster.FILE, barriers.FILE, consents.FILE, OWNERS_FILE}
    assert all(NAMED[name][2] == "must follow from the bundle" for name in ONLY_OURS)
    assert all(row[1] == "by the manifest" for row in NAMED.values())


@pytest.mark.parametrize("name", NAMED)
def test_each_verifier_reads_what_the_table_says(
    name: str, package: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file says something made up, and the collector signs it: whoever reads it refuses it, or speaks of it."""
    row = NAMED[name]
    of_phase = not any(name == of for of in (proposals.FILE, roster.FILE, barriers.FILE, consents.FILE, OWNERS_FILE))
    (package.artifacts / ("full" if of_phase else ".") / name).write_bytes(FALSE)
    if name == roster.FILE:  # read where there is a proposal
        (package.artifacts / proposals.FILE).write_bytes(FALSE)
    collector.seal(package.run_dir)
    ours, other = verdicts(package, package.signers)
    assert other == 0
    assert (ours in (1, 2)) if row[2].startswith("must follow") else ours == 0
    options = [str(package.run_dir), "--allowed-signers", str(package.signers)]
    if "--domain" in row[2]:
        for n in range(3):
            key = package.signers.with_name(f"domain-{n}.pub")
            key.write_text(sshsig.public_line(bytes([n]) * 32) + "\n")
            options += ["--domain", str(key)]
        assert run_verify(options) in (1, 2)
    if "--log-key" in row[2]:
        key = package.signers.with_name("log.pub")
        public = Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key()
        key.write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
        assert run_verify([*options, "--log-key", str(key)]) in (1, 2)
    said(capsys)
