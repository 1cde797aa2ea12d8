"""Names of outside origin: total, part by part, and never out of the folder they are for."""

from __future__ import annotations

import hashlib
import json
import os
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from uvcc_engine.contract.checkpoints import checkpoint
from uvcc_engine.contract.errors import ConfigError, VerificationError
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.parsing import safepaths
from uvcc_engine.contract.parsing.canonical import sorted_json
from uvcc_engine.contract.parsing.safepaths import Refused, check_paths, matches, safe_name, safe_relative, shown

PIECES = st.sampled_from(
    ["..", ".", "", "a", "A", "transcript_p0r0s0t0", "leaves.bin", "~", "\0", "\\", "é", "e\u0301"]
)
NAMES = st.one_of(st.text(), st.lists(PIECES).map("/".join), st.lists(st.text(max_size=3)).map("/".join))
ANYTHING = st.one_of(NAMES, st.none(), st.integers(), st.binary(), st.lists(NAMES), st.floats())


@settings(max_examples=400, deadline=None)
@given(ANYTHING)
@example("transcript_x/../../../../.bashrc")
@example("\ud800")
def test_whatever_is_given_is_judged_and_what_passes_stays_below(name: object) -> None:
    found = safe_relative(name)
    if isinstance(found, Refused):
        assert found.reason
        assert str(found).isascii()
        assert str(found).isprintable()
        assert len(found.name) <= safepaths.SHOWN
        return
    assert isinstance(name, str)
    assert "/".join(found) == name
    root = "/srv/home"
    assert os.path.normpath(os.path.join(root, name)) == f"{root}/{name}"
    assert found == tuple(Path(name).parts)


@settings(max_examples=300, deadline=None)
@given(st.lists(NAMES))
def test_checked_names_are_different_files_on_every_disk(names: list[str]) -> None:
    found = check_paths(names)
    assert len(found.kept) + len(found.refused) == len(names)
    folded = [n.casefold() for n in found.kept]
    assert len(set(folded)) == len(folded)
    assert not any(a != b and b.startswith(f"{a}/") for a in folded for b in folded)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../x", "leads out"),
        ("transcript_x/../../y", "leads out"),
        ("..", "leads out"),
        ("/etc/passwd", "absolute"),
        ("a//b", "normal form"),
        ("a/", "normal form"),
        ("./a", "normal form"),
        ("", "empty"),
        ("a\\..\\b", "backslash"),
        ("a\nb", "control"),
        ("a\x1b[2Jb", "control"),
        ("a\x9b2J", "control"),
        ("worker_\u202egol.log", "ASCII"),
        ("e\u0301.log", "ASCII"),
        ("\uff0e\uff0e/x", "ASCII"),
        ("a b", "letters, digits"),
        ("c:x", "letters, digits"),
        ("$(id)", "letters, digits"),
        ("~root", "letters, digits"),
        ("aux.log", "device"),
        ("x.", "dot"),
        ("a" * 201, "a part longer"),
        ("/".join("a" * 9), "folders deep"),
        ("a/" * 400 + "b", "longer than 512"),
        (b"a", "not text"),
        (None, "not text"),
    ],
)
def test_every_kind_of_bad_name_has_its_reason(name: object, reason: str) -> None:
    found = safe_relative(name)
    assert isinstance(found, Refused)
    assert reason in found.reason


def test_a_star_never_crosses_a_folder() -> None:
    assert fnmatch("transcript_x/../../.bashrc", "transcript_*/*")  # what the standard library says
    assert not matches(tuple(["transcript_x", "..", "..", ".bashrc"]), "transcript_*/*")
    assert matches(("transcript_x", "leaves.bin"), "transcript_*/*")
    assert not matches(("transcript_x",), "transcript_*/*")
    assert not matches(("Run.info",), "run.info")


def test_duplicates_also_where_case_does_not_count_and_files_that_are_folders() -> None:
    found = check_paths(["a/b", "A/B", "a/b", "a", "c", "c/d"])
    assert list(found.kept) == ["a/b", "c"]
    assert [r.reason for r in found.refused] == ["given twice"] * 2 + ["both a file and a folder"] * 2


def test_one_part_alone() -> None:
    assert safe_name("a.box") == "a.box"
    assert isinstance(safe_name("a/b"), Refused)
    assert shown("x" * 500).endswith("...")


@pytest.mark.parametrize(
    "text", ["p00r0s0t0", "p٣r0s0t0", "p0r0s0t" + "9" * 5000, "p0r0s0t0\n", "P0r0s0t0", "p-1r0s0t0"]
)
def test_a_worker_has_one_name(text: str) -> None:
    with pytest.raises(ConfigError):
        Coord.parse(text)
    assert str(Coord.parse("p2r10s0t7")) == "p2r10s0t7"


# ---- checkpoint manifests ------------------------------------------------------------------------------------------


def forged(root: Path, files: Any, **body: Any) -> Path:
    """A manifest that agrees with itself, as anybody can make one."""
    folder = root / "step-1"
    folder.mkdir(parents=True)
    part = {"rank": 0, "coord": "p0r0s0t0", "epoch_root": "", "cursors": {}, "rng": {}, "extra": {}, "files": files}
    whole = {"format": 1, "run": "r", "step": 1, "topology": {}, "ranks": {"0": part}} | body
    text = sorted_json({"body": whole, "body_sha256": hashlib.sha256(sorted_json(whole).encode()).hexdigest()}).encode()
    (folder / checkpoint.MANIFEST).write_bytes(text)
    return folder


GOOD = {"bytes": 1, "sha256": "ab" * 32}


@pytest.mark.parametrize(
    "files",
    [
        {"../../secret": GOOD},
        {"/etc/shadow": GOOD},
        {"a/b": GOOD},
        {"": GOOD},
        {"..": GOOD},
        {"MANIFEST.json": GOOD},
        {"rank0.safetensors": {"bytes": "1", "sha256": "ab" * 32}},
        {"rank0.safetensors": {"bytes": -1, "sha256": "ab" * 32}},
        {"rank0.safetensors": {"bytes": True, "sha256": "ab" * 32}},
        {"rank0.safetensors": {"bytes": 1}},
        {"rank0.safetensors": 7},
        ["rank0.safetensors"],
        None,
    ],
)
def test_a_manifest_names_files_beside_itself_or_nothing(tmp_path: Path, files: Any) -> None:
    with pytest.raises(VerificationError, match="damaged"):
        checkpoint.verify(forged(tmp_path, files))


def test_what_lies_in_a_files_place_holds_nobody_up(tmp_path: Path) -> None:
    folder = forged(tmp_path, {"rank0.safetensors": GOOD})
    path = folder / "rank0.safetensors"
    begin = time.monotonic()
    for make in (lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero"), path.mkdir):
        make()
        with pytest.raises(VerificationError, match="cannot be read"):
            checkpoint.verify(folder)
        path.rmdir() if path.is_dir() else path.unlink()
    with path.open("wb") as f:
        f.truncate(1 << 40)  # a terabyte of nothing: as much is read as was announced
    with pytest.raises(VerificationError, match="altered"):
        checkpoint.verify(folder)
    manifest = folder / checkpoint.MANIFEST
    manifest.unlink()
    os.mkfifo(manifest)
    with pytest.raises(VerificationError, match="no manifest"):
        checkpoint.verify(folder)
    manifest.unlink()
    with manifest.open("wb") as f:
        f.truncate(1 << 40)
    with pytest.raises(VerificationError, match="longer than"):
        checkpoint.verify(folder)
    manifest.write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(VerificationError, match="damaged"):
        checkpoint.verify(folder)
    assert time.monotonic() - begin < 60


def test_what_a_run_wrote_itself_still_verifies(tmp_path: Path) -> None:
    made = checkpoint.save(tmp_path, run="r", step=3, topology={}, contents={"rank0.safetensors": b"x" * 10})
    assert checkpoint.verify(made.path).sha256 == made.sha256
    assert json.loads((made.path / checkpoint.MANIFEST).read_text())["body"]["step"] == 3
