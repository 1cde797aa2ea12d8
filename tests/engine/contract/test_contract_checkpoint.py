from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uvcc_engine.contract.checkpoints import checkpoint as cp
from uvcc_engine.contract.errors import ConfigError, UvccError, VerificationError


def make(root: Path, step: int, **changes: Any) -> cp.CheckpointManifest:
    wanted: dict[str, Any] = {
        "run": "r",
        "step": step,
        "topology": {"replicas": 1},
        "contents": {"rank0.safetensors": b"x" * 1000 + bytes([step % 256])},
        "epoch_root": "ab" * 32,
        "cursors": {"data": step, "channels": {"1": 7}},
        "rng": {"seed": 7},
        "extra": {"attempt": 0},
    }
    return cp.save(root, **{**wanted, **changes})


def test_round_trip(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        path.write_bytes(b"written by a callback")

    made = make(tmp_path, 4, contents={"rank0.safetensors": b"abc", "more.bin": write})
    found = cp.verify(tmp_path / "step-4", made.sha256)
    assert found == made
    state = found.rank(0)
    assert (state.cursors, state.rng, state.epoch_root) == ({"data": 4, "channels": {"1": 7}}, {"seed": 7}, "ab" * 32)
    assert state.files["more.bin"]["bytes"] == 21
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-4"]
    with pytest.raises(VerificationError, match="no state of rank 1"):
        found.rank(1)


def test_same_state_gives_the_same_hash_and_is_kept(tmp_path: Path) -> None:
    first = make(tmp_path, 4)
    inode = (tmp_path / "step-4").stat().st_ino
    assert make(tmp_path, 4).sha256 == first.sha256
    assert (tmp_path / "step-4").stat().st_ino == inode
    other = make(tmp_path, 4, rng={"seed": 8})
    assert other.sha256 != first.sha256
    assert cp.verify(tmp_path / "step-4").sha256 == other.sha256
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-4"]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_flipped_byte_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    root = tmp_path_factory.getbasetemp() / "flip"
    if not root.exists():
        make(root, 1)
    target = root / "step-1" / data.draw(st.sampled_from(["MANIFEST.json", "rank0.safetensors"]))
    good = target.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[at] ^= data.draw(st.integers(1, 255))
    try:
        target.write_bytes(bytes(bad))
        with pytest.raises(VerificationError, match="checkpoint: "):
            cp.verify(root / "step-1")
    finally:
        target.write_bytes(good)
    cp.verify(root / "step-1")


def test_missing_and_shortened_files_are_named(tmp_path: Path) -> None:
    make(tmp_path, 1)
    path = tmp_path / "step-1" / "rank0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(VerificationError, match=r"rank0\.safetensors was altered"):
        cp.verify(tmp_path / "step-1")
    path.unlink()
    with pytest.raises(VerificationError, match=r"rank0\.safetensors cannot be read"):
        cp.verify(tmp_path / "step-1")
    with pytest.raises(VerificationError, match="no manifest"):
        cp.verify(tmp_path / "step-2")


def test_another_checkpoint_under_the_name_is_found(tmp_path: Path) -> None:
    named = make(tmp_path, 1)
    make(tmp_path, 2)
    with pytest.raises(VerificationError, match="another checkpoint"):
        cp.verify(tmp_path / "step-2", named.sha256)
    (tmp_path / "step-2").rename(tmp_path / "step-3")
    seen: list[str] = []
    found = cp.latest_verified(tmp_path, on_bad=lambda path, error: seen.append(str(error)))
    assert found is not None
    assert found.step == 1
    assert "was renamed" in seen[0]


def test_latest_falls_back_and_says_so(tmp_path: Path) -> None:
    for step in (1, 2, 30):
        make(tmp_path, step)
    (tmp_path / "step-40.tmp-abc").mkdir()
    (tmp_path / "step-30" / "rank0.safetensors").write_bytes(b"")
    seen: list[Path] = []
    found = cp.latest_verified(tmp_path, run="r", on_bad=lambda path, error: seen.append(path))
    assert found is not None
    assert (found.step, seen) == (2, [tmp_path / "step-30"])
    early = cp.latest_verified(tmp_path, not_after=1)
    assert early is not None
    assert early.step == 1
    assert cp.latest_verified(tmp_path, run="other") is None
    assert cp.latest_verified(tmp_path / "nothing") is None


def test_retention_counts_verified_ones_only(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        make(tmp_path, step)
    for step in (4, 5):
        (tmp_path / f"step-{step}" / "rank0.safetensors").write_bytes(b"broken")
    (tmp_path / "step-2.tmp-dead").mkdir()
    (tmp_path / "step-9.tmp-alive").mkdir()
    assert cp.prune(tmp_path, keep=2) == [1]
    assert cp.steps_present(tmp_path) == [5, 4, 3, 2]
    assert not (tmp_path / "step-2.tmp-dead").exists()
    assert (tmp_path / "step-9.tmp-alive").exists()
    with pytest.raises(ConfigError):
        cp.prune(tmp_path, keep=0)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def fails(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(UvccError, match="cannot write") as caught:
        make(tmp_path, 1, contents={"rank0.safetensors": fails})
    assert "free space" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="file name"):
        make(tmp_path, 1, contents={"../x": b""})


def test_several_ranks_commit_once_all_have_written(tmp_path: Path) -> None:
    for rank in (0, 1):
        state = cp.RankState(rank=rank, coord=f"p0r{rank}s0t0", cursors={"data": rank})
        cp.write_rank(tmp_path, 7, "attempt0", state, {cp.rank_file(rank): bytes([rank]) * 10})
        assert cp.latest_verified(tmp_path) is None
    with pytest.raises(UvccError, match="rank2"):
        cp.commit(tmp_path, run="r", step=7, token="attempt0", ranks=[0, 1, 2], topology={"replicas": 2})
    made = cp.commit(tmp_path, run="r", step=7, token="attempt0", ranks=[0, 1], topology={"replicas": 2})
    found = cp.verify(tmp_path / "step-7", made.sha256)
    assert [found.rank(r).cursors["data"] for r in (0, 1)] == [0, 1]
    assert sorted(p.name for p in (tmp_path / "step-7").iterdir()) == [
        "MANIFEST.json",
        "rank0.safetensors",
        "rank1.safetensors",
    ]
