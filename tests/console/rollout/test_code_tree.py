"""The folder that a command takes along: what git ignores and what looks like a secret stays; the rest is one hash."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from uvcc_console.haltd.service import AT_ONCE_S, ladder_times
from uvcc_console.plan import code_tree
from uvcc_console.plan.code_tree import survey
from uvcc_console.plan.profile import parse
from uvcc_console.plan.schema import CommandJobSettings
from uvcc_console.rollout.stages.verify.outputs import MOST_FILES, chosen
from uvcc_engine.contract import RunWriter
from uvcc_engine.contract.errors import ConfigError, UvccError


def job(folder: Path, **more: Any) -> CommandJobSettings:
    return CommandJobSettings(kind="command", argv=["x"], steps=1, code=str(folder), **more)


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.email=a@example.org", "-c", "user.name=a"]
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "mine"
    (root / "pkg").mkdir(parents=True)
    (root / "train.py").write_text("print(1)\n")
    (root / "pkg" / "tokenizer.py").write_text("VALUE = 1\n")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / ".gitignore").write_text("data/\n*.ckpt\n!keep.ckpt\n")
    (root / "data").mkdir()
    (root / "data" / "big.bin").write_bytes(b"x" * 1000)
    (root / "a.ckpt").write_text("no")
    (root / "keep.ckpt").write_text("yes")
    (root / ".env").write_text("PASSWORD=1")
    (root / "pkg" / "deploy.pem").write_text("key")
    (root / "out.py").symlink_to("/etc/passwd")
    return root


TAKEN = [".gitignore", "keep.ckpt", "pkg/tokenizer.py", "run.sh", "train.py"]


@pytest.mark.parametrize("repository", [True, False])
def test_git_decides_and_secrets_and_links_stay(folder: Path, repository: bool) -> None:
    if repository:
        git(folder, "init", "-q")
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", "one")
    tree = survey(job(folder))
    assert [f.path for f in tree.files] == TAKEN
    assert [f.path for f in tree.files if f.executable] == ["run.sh"]
    left = " ".join(tree.left_out)
    assert all(name in left for name in (".env", "pkg/deploy.pem", "out.py"))
    assert (bool(tree.commit), tree.dirty) == (repository, False)
    assert not (folder / ".git").exists() or repository  # asking git leaves nothing here
    (folder / "train.py").write_text("print(2)\n")
    again = survey(job(folder))
    assert again.sha256 != tree.sha256
    assert again.dirty == repository
    assert ".env" in [f.path for f in survey(job(folder, code_include=[".env"])).files]
    assert [f.path for f in survey(job(folder, code_exclude=["pkg"])).files] == [p for p in TAKEN if "pkg" not in p]


def test_what_is_too_large_is_refused_with_its_largest_files(folder: Path) -> None:
    (folder / "huge.npy").write_bytes(b"x" * 200_000)
    with pytest.raises(ConfigError, match=r"the largest: huge\.npy \(0\.2 MiB\)"):
        survey(job(folder, code_mib=0.1))
    with pytest.raises(ConfigError, match="there is no folder"):
        survey(job(folder / "nothing"))


def test_the_archive_is_the_same_bytes_for_the_same_tree_and_is_held_to_it(folder: Path, tmp_path: Path) -> None:
    tree = survey(job(folder))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        code_tree.keep(tree, tmp_path / name)
        os.utime(folder / "train.py", (1, 1))
    archives = [(tmp_path / name / code_tree.ARCHIVE).read_bytes() for name in ("a", "b")]
    assert archives[0] == archives[1]
    assert code_tree.kept(tmp_path / "a") == tree
    with tarfile.open(tmp_path / "a" / code_tree.ARCHIVE) as tar:
        assert {m.name: m.mode for m in tar}["run.sh"] == 0o755
    (folder / "train.py").write_text("print(3)\n")
    with pytest.raises(UvccError, match=r"train\.py was changed"):
        code_tree.keep(tree, tmp_path / "b")


def test_keys_that_need_a_folder_are_refused_without_one() -> None:
    command = {"kind": "command", "argv": ["x"], "steps": 1}
    for more in ({"setup": "auto"}, {"artifacts": ["out/*"]}, {"code": "x", "cwd": "../up"}):
        with pytest.raises(ConfigError, match=r"job\.(setup|cwd)"):
            parse({"job": {**command, **more}})


def test_artifacts_are_chosen_by_pattern_and_a_hostile_listing_gives_nothing_else() -> None:
    names = ["out/a.pt", "out/deep/b.pt", "log.txt", "../up.pt", "/abs.pt", "out/\x1b[31m.pt", "out/c d.pt", "out/A.pt"]
    listing = "\n".join(f"{10 + i}  ./{name}" for i, name in enumerate(names)) + "\nnonsense\n5  out/x.pt"
    assert set(chosen(listing, ["out/*.pt"])[0]) == {"out/a.pt"}  # A.pt is the same file where case does not count
    assert set(chosen(listing, ["**/*.pt"])[0]) == {"out/a.pt", "out/deep/b.pt"}
    assert set(chosen(listing, ["out"])[0]) == {"out/a.pt", "out/deep/b.pt"}
    taken, left = chosen(listing, ["*.txt", "nothing/*"])
    assert taken == {"log.txt": (("log.txt",), 12)}
    assert left == ["nothing is named nothing/*"]
    many = "\n".join(f"1  ./f{i}" for i in range(MOST_FILES + 3))
    taken, left = chosen(many, ["*"])
    assert (len(taken), len(left)) == (MOST_FILES, 3)


def test_a_command_that_cannot_be_held_is_ended_at_once() -> None:
    assert ladder_times({"job": {"kind": "command", "halt": "sigterm"}}).halt == AT_ONCE_S
    assert ladder_times({"job": {"kind": "command"}, "halt": {"patience": 20.0}}).halt == 120.0


def test_a_run_says_which_code_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UVCC_CODE_TREE", "ab" * 32)
    monkeypatch.setenv("UVCC_CODE_COMMIT", "cd" * 20)
    monkeypatch.setenv("UVCC_CODE_DIRTY", "1")
    with RunWriter.open(tmp_path, run="mine") as run:
        run.describe({"steps": 3})
    assert '"dirty": "1"' in (tmp_path / "run.json").read_text() or '"dirty":"1"' in (tmp_path / "run.json").read_text()
