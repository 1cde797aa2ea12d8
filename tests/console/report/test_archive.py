"""The auditor's package: packed, unpacked by a stranger, checked without any code of ours, and never a trap."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from package_mutations import Mutations
from package_run import Package, copy_of, home, said

import uvcc_engine
from uvcc_console.cli.main import main
from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.report import archive, received, record
from uvcc_console.report import package as verdicts
from uvcc_console.report.package import Package as Read
from uvcc_console.report.page import page
from uvcc_console.report.record import RunRecord
from uvcc_console.report.verify import run_verify
from uvcc_engine import __version__
from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.proof import standalone_verify

SAMPLE = int(os.environ.get("UVCC_STANDALONE_MUTATIONS", "15"))


@pytest.fixture(scope="module")
def packed(made_package: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Package, Path]:
    """A run packed as tar.zst; its folder is complete."""
    folder = tmp_path_factory.mktemp("packed") / "home"
    package = copy_of(made_package, folder)
    with home(folder):
        path, _ = archive.write_package(package.run_dir, out=folder / "run.uvcc.tar.zst")
    return package, path


@pytest.fixture
def opened(packed: tuple[Package, Path], tmp_path: Path) -> Path:
    """The package as an auditor has it: unpacked somewhere else."""
    with received.unpacked(packed[1]) as there:
        return Path(shutil.copytree(there, tmp_path / "opened"))


def standalone(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """``verify.py`` of the package, in an environment that holds nothing but the way to ssh-keygen."""
    command = [sys.executable, "-I", "verify.py", *words]
    env = {"PATH": os.environ["PATH"]}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=500, check=False)


def test_a_stranger_verifies_it_with_its_own_verifier(packed: tuple[Package, Path], opened: Path) -> None:
    done = standalone(opened, "--allowed-signers", str(packed[0].signers))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("VERIFIED\n")
    assert "could look at everything" in done.stdout
    assert (opened / "recording.jsonl").stat().st_size > 1000
    assert "public seed" in done.stdout


def test_without_keys_it_says_what_lacks(opened: Path) -> None:
    done = standalone(opened)
    assert done.returncode == 3
    assert "NOT CHECKED  pinned" in done.stdout
    assert "VERIFIED" not in done.stdout


def test_both_verifiers_read_the_archive_and_the_folder(packed: tuple[Package, Path], opened: Path) -> None:
    words = ["--allowed-signers", str(packed[0].signers)]
    assert run_verify([str(packed[1]), *words]) == 0
    assert run_verify([str(opened), *words]) == 0
    assert standalone_verify.main([str(opened), *words]) == 0


def test_somebody_elses_keys_are_refused_by_both(packed: tuple[Package, Path], opened: Path, tmp_path: Path) -> None:
    lines = packed[0].signers.read_text().splitlines()
    wrong = tmp_path / "wrong"
    for party in range(3):
        other = lines[(party + 1) % 3].split()[-1]
        swapped = [line.replace(line.split()[-1], other) if line.startswith(f"P{party} ") else line for line in lines]
        wrong.write_text("\n".join(swapped) + "\n")
        assert run_verify([str(opened), "--allowed-signers", str(wrong)]) == 1
        assert standalone_verify.main([str(opened), "--allowed-signers", str(wrong)]) == 1


def test_the_policy_pins_as_well(packed: tuple[Package, Path], opened: Path) -> None:
    words = ["--policy", str(packed[0].artifacts / "full" / "policy.json")]
    assert run_verify([str(opened), *words]) == standalone_verify.main([str(opened), *words]) == 6


def test_the_verifier_is_one_short_file_without_our_code() -> None:
    text = (files("uvcc_engine.transcript.proof") / "standalone_verify.py").read_text()
    assert text.count("\n") <= 600
    assert "import uvcc" not in text
    assert "from uvcc" not in text
    named = set(re.findall(r"^(?:from|import) ([a-z_.]+)", text, re.MULTILINE))
    assert {name.partition(".")[0] for name in named} <= sys.stdlib_module_names


@given(st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: abs(x) < 2**53 or x != int(x)))
def test_its_numbers_are_those_of_canonical_json(value: float) -> None:
    assert standalone_verify.canonical(value) == canonical(value)


def test_a_number_spelled_otherwise_is_refused() -> None:
    for text in (b'{"a":1.50}', b'{"a":1.0}', b'{"a":1e-5}', b'{"a":-0.0}', b'{"a":1E-7}'):
        with pytest.raises(standalone_verify.Unreadable, match="not canonical"):
            standalone_verify.parse_canonical(text, "it")


class Compared(Mutations):
    """Every falsification is put before both verifiers, which must give one verdict."""

    def verdict(self) -> tuple[int, str]:
        code, err = super().verdict()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            other = standalone_verify.main(self.args)
        assert other == code, (code, other, err, said.getvalue())
        assert "Traceback" not in said.getvalue()
        return code, err


@pytest.mark.ci("tests/console/report/test_package_mutations.py")
def test_the_two_verifiers_agree_on_falsified_packages(packed: tuple[Package, Path], tmp_path: Path) -> None:
    shutil.copytree(packed[0].run_dir.parent.parent, tmp_path / "home")
    run_dir = tmp_path / "home" / "runs" / packed[0].run_dir.name
    with home(tmp_path / "home"):
        words = [str(run_dir), "--allowed-signers", str(packed[0].signers)]
        Compared(run_dir / "artifacts", words, random.Random(7)).run(SAMPLE)


@pytest.mark.ci(__file__)
def test_the_howto_is_followed_literally(packed: tuple[Package, Path], opened: Path) -> None:
    text = (opened / "HOWTO.md").read_text()
    assert "@" not in text.replace("@ssh", "")
    (source,) = re.findall(r"\(`([\w/.]+)` of release ([\w.]+)\)", text)
    assert source[1] == __version__
    assert (opened / "verify.py").read_bytes() == (Path(uvcc_engine.__file__).parents[1] / source[0]).read_bytes()
    assert "You do not know that each product was computed rightly" in text
    keys = re.search(r"```text\n(P0 .*?)```", text, re.DOTALL)
    assert keys is not None
    (opened.parent / "keys").write_text(keys[1])
    commands = [c for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL) for c in block.splitlines()]
    assert commands == ["python3 -I verify.py --allowed-signers ../keys"]
    done = standalone(opened, *commands[0].split()[3:])
    assert (done.returncode, done.stderr) == (0, "")
    by_hand = re.search(r"with `jq` and OpenSSH alone:\n\n```text\n(.*?)```", text, re.DOTALL)
    assert by_hand is not None
    script = f"set -e -o pipefail; cd full; {by_hand[1]}"
    shown = subprocess.run(["bash", "-c", script], cwd=opened, capture_output=True, text=True, timeout=500, check=False)
    assert (shown.returncode, shown.stdout.count('Good "uvcc-')) == (0, 9), shown
    again = standalone(opened, *commands[0].split()[3:])
    assert (again.returncode, again.stdout) == (0, done.stdout)  # what was tried by hand left nothing there
    (opened / "notes.txt").write_text("mine")
    added = standalone(opened, *commands[0].split()[3:])
    assert (added.returncode, added.stderr) == (1, "NOT VERIFIED  added or removed since it was signed: notes.txt\n")
    (opened / "notes.txt").unlink()


class Page(HTMLParser):
    """What a browser would load, and the text it would show."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "action", "srcset", "data")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_self_contained_and_says_what_was_signed(opened: Path) -> None:
    shown = Page()
    shown.feed((opened / "index.html").read_text())
    text = " ".join(shown.text)
    assert shown.loads
    assert all(link.startswith("data:image/svg+xml;base64,") for link in shown.loads)
    assert shown.tags.isdisjoint({"script", "link", "iframe", "object", "form"})
    for phase in ("full",):  # the only one that this journal knows
        bundle = (opened / phase / "proof_bundle.json").read_text()
        assert re.search('"run_root":"([0-9a-f]{64})"', bundle)[1] in text  # type: ignore[index]
    assert "one operator runs the data owner's program" in text
    assert "Not verified by anything in this package" in text


def test_markup_from_anywhere_is_text(made_package: Path, tmp_path: Path) -> None:
    package = copy_of(made_package, tmp_path / "home")
    journal = Journal(package.run_dir / "journal.sqlite")
    journal.append(ev.RunEnded(status="failed", detail="<script>alert(1)</script>\x1b[2J"))
    journal.close()
    text = page(Read(RunRecord.load(package.run_dir)))
    assert "<script" not in text
    assert "\x1b" not in text
    assert "&lt;script&gt;" in text


@pytest.mark.ci(__file__)
def test_a_zip_is_as_good(packed: tuple[Package, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = packed[0]
    out = tmp_path / "run.zip"
    with home(package.run_dir.parent.parent):
        assert main(["package", package.run_dir.name, "--format", "zip", "--output", str(out)]) == 0
    assert str(out) in said(capsys)["out"]
    assert run_verify([str(out), "--allowed-signers", str(package.signers)]) == 0


def test_packing_twice_gives_the_same_bytes(packed: tuple[Package, Path], tmp_path: Path) -> None:
    package, first = packed
    with home(package.run_dir.parent.parent):
        archive.pack_folder(package.artifacts, package.run_dir.name, tmp_path / "again.tar.zst", "tar.zst")
        archive.pack_folder(package.artifacts, package.run_dir.name, tmp_path / "third.tar.zst", "tar.zst")
    assert (tmp_path / "again.tar.zst").read_bytes() == (tmp_path / "third.tar.zst").read_bytes()
    assert first.stat().st_size > 10_000


@pytest.mark.ci(__file__)
def test_the_journal_is_folded_and_each_phase_verified_once(
    made_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, read, verified = copy_of(made_package, tmp_path / "home"), list[Path](), list[Path]()
    load, verify = record.iter_events, verdicts.verify
    monkeypatch.setattr(record, "iter_events", lambda path: (read.append(path), load(path))[1])
    monkeypatch.setattr(verdicts, "verify", lambda path, **pins: (verified.append(path), verify(path, **pins))[1])
    with home(tmp_path / "home"):
        archive.write_package(package.run_dir, out=tmp_path / "run.uvcc.tar.zst")
    assert len(read) == 1
    assert sorted(p.parent.name for p in verified) == ["full"]  # the only one that the journal tells of


def test_a_changed_file_is_not_packed(made_package: Path, tmp_path: Path) -> None:
    package = copy_of(made_package, tmp_path / "home")
    log = package.artifacts / "run_full.log"
    log.write_text(log.read_text() + "and then all was well\n")
    with home(tmp_path / "home"):
        assert main(["package", package.run_dir.name, "--output", str(tmp_path / "x.zip"), "--format", "zip"]) == 1
    assert not (tmp_path / "x.zip").exists()


def test_a_run_that_proves_nothing_is_refused(made_package: Path, tmp_path: Path) -> None:
    package = copy_of(made_package, tmp_path / "home")
    for phase in ("smoke", "full"):
        (package.artifacts / phase / "proof_bundle.json").unlink()
    with home(tmp_path / "home"), pytest.raises(ConfigError, match="no readable proof bundle"):
        archive.write_package(package.run_dir, "zip", tmp_path / "x.zip")


def test_a_bundle_of_another_release_is_refused_with_the_reason(made_package: Path, tmp_path: Path) -> None:
    """Not as a run whose phase is yet to be verified: a data folder may be older than the release that reads it."""
    package = copy_of(made_package, tmp_path / "home")
    for phase in ("smoke", "full"):
        (package.artifacts / phase / "proof_bundle.json").write_text('{"format": "of another release"}')
    with (
        home(tmp_path / "home"),
        pytest.raises(UnreadableError, match=r"the proof bundle of phase \w+ cannot be read: "),
    ):
        archive.write_package(package.run_dir, "zip", tmp_path / "x.zip")


# ---- archives of strangers -----------------------------------------------------------------------------------------


def zipped(path: Path, name: str, mode: int = 0o100644) -> None:
    with zipfile.ZipFile(path, "w") as made:
        entry = zipfile.ZipInfo(name)
        entry.external_attr = mode << 16
        made.writestr(entry, b"x")


def tarred(path: Path, name: str, kind: bytes = tarfile.REGTYPE) -> None:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as made:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname, entry.size = kind, "/etc/passwd", 1 if kind == tarfile.REGTYPE else 0
        made.addfile(entry, io.BytesIO(b"x"))
    path.write_bytes(received.zstandard_module().ZstdCompressor().compress(plain.getvalue()))


NAMES = ["../out", "/abs", "a/../../out", "a//b", "a/./b", "a\\..\\b", "..", "a/" + "b" * 2000]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["zip", "tar.zst"])
def test_no_name_leads_out_of_the_folder(kind: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{kind}"
    (zipped if kind == "zip" else tarred)(path, name)
    with pytest.raises(UnreadableError), received.unpacked(path):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_only_plain_files_are_unpacked(kind: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.tar.zst"
    tarred(path, "run/link", kind)
    with pytest.raises(UnreadableError, match="no plain file"), received.unpacked(path):
        pass


@pytest.mark.parametrize("kind", ["zip", "tar.zst"])
def test_folders_that_another_program_noted_are_passed_over(kind: str, tmp_path: Path) -> None:
    """``zip -r`` and ``tar`` note a folder before its files; what is in none of them is made by no name."""
    path, plain = tmp_path / f"x.{kind}", io.BytesIO()
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "a").write_bytes(b"1")
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as made:
            for one in ("run", "run/logs", "run/logs/a"):
                made.write(tmp_path / one, one)
            made.writestr("../out/", b"")
    else:
        with tarfile.open(fileobj=plain, mode="w") as tar:
            tar.add(tmp_path / "run", "run")
        path.write_bytes(received.zstandard_module().ZstdCompressor().compress(plain.getvalue()))
    with received.unpacked(path) as folder:
        assert [str(p.relative_to(folder)) for p in sorted(folder.rglob("*"))] == ["logs", "logs/a"]
    assert not (tmp_path.parent / "out").exists()


def test_an_encrypted_zip_is_told_as_that(tmp_path: Path) -> None:
    zipped(tmp_path / "x.zip", "run/a")
    data = bytearray((tmp_path / "x.zip").read_bytes())
    for head, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(head) + at] |= 1  # the flag that the file is encrypted
    (tmp_path / "x.zip").write_bytes(data)
    with pytest.raises(UnreadableError, match="is encrypted") as e, received.unpacked(tmp_path / "x.zip"):
        pass
    assert "without a password" in e.value.hint


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    zipped(tmp_path / "x.zip", "run/link", 0o120777)
    with pytest.raises(UnreadableError, match="no plain file"), received.unpacked(tmp_path / "x.zip"):
        pass


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as made:
        made.writestr("run/a", b"1")
        with pytest.warns(UserWarning, match="Duplicate"):
            made.writestr("run/a", b"2")
    with pytest.raises(UnreadableError, match="File exists"), received.unpacked(tmp_path / "x.zip"):
        pass


def test_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(received, "MOST", 1_000_000)
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("run/a", bytes(2_000_000))
    with pytest.raises(UnreadableError, match="unpacks to more than"), received.unpacked(tmp_path / "x.zip"):
        pass


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK])
def test_what_stands_beside_a_file_is_not_read_into_memory_however_long_it_says_it_is(
    kind: bytes, tmp_path: Path
) -> None:
    """A package of 65 KB took 2 GiB."""
    head, path = tarfile.TarInfo("head"), tmp_path / "x.tar.zst"
    head.type, head.size = kind, 1 << 32
    held = head.tobuf(tarfile.USTAR_FORMAT) + bytes(1 << 22)
    path.write_bytes(received.zstandard_module().ZstdCompressor().compress(held))
    tracemalloc.start()
    try:
        with pytest.raises(UnreadableError, match="bytes beside a file"), received.unpacked(path):
            pass
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_list_of_files_is_not_read_however_long_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a package of 80 MB that listed one file over and over, 740 MB were kept before the files were counted."""
    monkeypatch.setattr(received, "LONGEST_LIST", 1000)
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as made:
        for number in range(30):
            made.writestr(f"run/{number}", b"x" * 5000)
    wanted = pytest.raises(UnreadableError, match="a list of files of more than 1000 bytes")
    with wanted, received.unpacked(tmp_path / "x.zip"):
        pass
    monkeypatch.setattr(received, "LONGEST_LIST", 100_000)  # of all files together there is more
    with received.unpacked(tmp_path / "x.zip") as folder:
        assert len(list(folder.iterdir())) == 30


@pytest.mark.parametrize("kind", ["gnu", "pax"])
def test_a_file_of_holes_is_none_of_a_package(kind: str, tmp_path: Path) -> None:
    """A hundred bytes were written to the disk as four gigabytes."""
    path, plain, size = tmp_path / "x.tar.zst", io.BytesIO(), 7 << 30
    entry = tarfile.TarInfo("run/a")
    if kind == "gnu":
        entry.type = tarfile.GNUTYPE_SPARSE
        head = bytearray(entry.tobuf(tarfile.GNU_FORMAT))
        head[386:410], head[483:495] = b"%011o\0" % 0 * 2, b"%011o\0" % size
        head[148:156] = b"%06o\0 " % (sum(head[:148]) + sum(head[156:512]) + 8 * ord(" "))
        plain.write(bytes(head) + bytes(1024))
    else:
        entry.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(size)}
        with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
            archive.addfile(entry)
    path.write_bytes(received.zstandard_module().ZstdCompressor().compress(plain.getvalue()))
    with pytest.raises(UnreadableError, match="no plain file"), received.unpacked(path):
        pass


def test_a_head_about_all_files_is_refused_however_short_it_is(tmp_path: Path) -> None:
    """It would rename or resize each file behind it."""
    path, plain = tmp_path / "x.tar.zst", io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "x"}) as archive:
        archive.addfile(tarfile.TarInfo("a/b"))
    path.write_bytes(received.zstandard_module().ZstdCompressor().compress(plain.getvalue()))
    with pytest.raises(UnreadableError, match="a head about all files"), received.unpacked(path):
        pass


def test_long_names_and_files_of_any_size_are_unpacked(tmp_path: Path) -> None:
    path, plain = tmp_path / "x.tar.zst", io.BytesIO()
    name, sizes = f"top/{'n' * 200}", [0, 1, 511, 512, 513, 70_000, 1 << 20, 3]
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for number, size in enumerate(sizes):
            entry = tarfile.TarInfo(f"{name}{number}")
            entry.size = size
            archive.addfile(entry, io.BytesIO(bytes([number]) * size))
    path.write_bytes(received.zstandard_module().ZstdCompressor().compress(plain.getvalue()))
    with received.unpacked(path) as folder:
        found = {entry.name[-1]: entry.read_bytes() for entry in folder.iterdir()}
    assert found == {str(number): bytes([number]) * size for number, size in enumerate(sizes)}


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_packed_bytes_that_nothing_unpacks_to_are_unreadable(method: int, tmp_path: Path) -> None:
    """A byte of them turned, at whatever place, ended with a traceback."""
    path, seen = tmp_path / "x.zip", set[bool]()
    with zipfile.ZipFile(path, "w", method) as made:
        made.writestr("a", b"words that are packed well, " * 40)
    whole, start = path.read_bytes(), 31 + len("a")
    for at in range(start, start + 30):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with pytest.raises(UnreadableError) as found, received.unpacked(path):
            pass
        seen.add("while decompressing" in found.value.what)
    assert (True in seen) == (method == zipfile.ZIP_DEFLATED)


@pytest.mark.parametrize("kind", ["zip", "tar.zst"])
def test_files_without_end_are_refused_though_they_hold_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(received, "MOST_FILES", 3)
    path = tmp_path / f"x.{kind}"
    names = [f"run/{number}" for number in range(4)]
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as made:
            for name in names:
                made.writestr(name, b"")
    else:
        heads = b"".join(tarfile.TarInfo(name).tobuf() for name in names)
        path.write_bytes(received.zstandard_module().ZstdCompressor().compress(heads + bytes(1024)))
    with pytest.raises(UnreadableError, match="holds more than 3 files"), received.unpacked(path):
        pass


@pytest.mark.parametrize("kind", ["zip", "tar.zst"])
def test_damage_is_said_in_one_line(kind: str, packed: tuple[Package, Path], tmp_path: Path) -> None:
    path = tmp_path / f"x.{kind}"
    path.write_bytes(packed[1].read_bytes()[:5000] if kind == "tar.zst" else b"PK\3\4 no zip")
    assert run_verify([str(path)]) == 2
