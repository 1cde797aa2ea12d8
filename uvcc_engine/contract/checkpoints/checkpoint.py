"""Checkpoints that are whole or absent, and proved before they are believed. Standard library only.

``checkpoints/step-N/`` holds the files of every rank of this directory (``rank{N}.safetensors`` and others) and
``MANIFEST.json``, which names each with size and SHA-256. All is written to ``step-N.tmp-<token>/``, fsynced, renamed
in one step, and the parent fsynced; so a directory without the suffix is complete, and a reader still checks every
byte. One rank per directory calls :func:`save`. Several ranks call :func:`write_rank` with one agreed token, then one
of them, after a barrier, :func:`commit`. What one holds and whether it is whole: ``checkpoint_manifest``, whose names
stand here, too, for this is the one module that others import.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uvcc_engine.contract.checkpoints.checkpoint_manifest import (
    CHUNK,
    EARLIER,
    FORMAT,
    MANIFEST,
    MANIFEST_BYTES,
    CheckpointManifest,
    RankState,
    checked_file,
    checked_name,
    rank_file,
    read_manifest,
    sha256_of,
    step_dir,
    text_of,
    verify,
    verify_in_steps,
    verify_step,
)
from uvcc_engine.contract.errors import ConfigError, UvccError, VerificationError
from uvcc_engine.contract.run_files import files

__all__ = [
    "CHUNK",
    "EARLIER",
    "FORMAT",
    "MANIFEST",
    "MANIFEST_BYTES",
    "CheckpointManifest",
    "Content",
    "FoundCheckpoints",
    "RankState",
    "checked_file",
    "checked_name",
    "commit",
    "drop",
    "drop_unfinished",
    "is_settled",
    "latest_verified",
    "parts_are_there",
    "prune",
    "rank_file",
    "read_manifest",
    "save",
    "set_aside",
    "sha256_of",
    "step_dir",
    "step_of",
    "steps_present",
    "survey",
    "text_of",
    "verify",
    "verify_in_steps",
    "verify_step",
    "write_rank",
]
Content = bytes | Callable[[Path], object]
"""A file's bytes, or a function that writes the file at the path it is given."""

_STEP_DIR = re.compile(r"step-([0-9]{1,15})")


def save(
    root: Path,
    *,
    run: str,
    step: int,
    rank: int = 0,
    coord: str = "p0r0s0t0",
    topology: Mapping[str, Any],
    contents: Mapping[str, Content],
    epoch_root: str = "",
    cursors: Mapping[str, Any] | None = None,
    rng: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> CheckpointManifest:
    """Write and commit the checkpoint of a directory's only rank. Raises UvccError; then nothing of it is left."""
    token = uuid.uuid4().hex[:12]
    state = RankState(
        rank=rank,
        coord=coord,
        epoch_root=epoch_root,
        cursors=dict(cursors or {}),
        rng=dict(rng or {}),
        extra=dict(extra or {}),
    )
    try:
        write_rank(root, step, token, state, contents)
        return commit(root, run=run, step=step, token=token, ranks=[rank], topology=topology)
    except BaseException:
        drop(root, step, token)
        raise


def write_rank(root: Path, step: int, token: str, state: RankState, contents: Mapping[str, Content]) -> None:
    """Write one rank's files and its part of the manifest into the directory that ``token`` names."""
    folder = _temporary(root, step, token)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        described = {name: _write_file(folder, name, contents[name]) for name in sorted(contents)}
    except OSError as error:
        raise files.write_failed(folder, error) from error
    part = dataclasses.asdict(dataclasses.replace(state, files=described))
    files.write_atomic(folder / _part_name(state.rank), text_of(part))


def commit(
    root: Path, *, run: str, step: int, token: str, ranks: Iterable[int], topology: Mapping[str, Any]
) -> CheckpointManifest:
    """Merge the ranks' parts into the manifest and make the checkpoint appear. All ranks must have returned.

    A checkpoint of the same step that is already there is kept if it is the same, byte for byte, else replaced.
    """
    folder, final = _temporary(root, step, token), step_dir(root, step)
    parts = {str(rank): files.read_json(folder / _part_name(rank)) for rank in sorted(ranks)}
    body = {"format": FORMAT, "run": run, "step": step, "topology": dict(topology), "ranks": parts}
    for rank in parts:
        (folder / _part_name(int(rank))).unlink()
    files.write_atomic(folder / MANIFEST, text_of({"body": body, "body_sha256": sha256_of(text_of(body))}))
    aside = None
    try:
        files.fsync_dir(folder)
        if final.exists():
            if (same := _same(final, read_manifest(folder).sha256)) is not None:
                shutil.rmtree(folder)
                return same
            aside = root / f"step-{step}.old-{token}"
            os.rename(final, aside)
        os.rename(folder, final)
        files.fsync_dir(root)
    except OSError as error:
        raise files.write_failed(final, error) from error
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)
    return read_manifest(final)


def drop(root: Path, step: int, token: str) -> None:
    """Delete what was written under ``token`` and will not be committed: it may be what fills the disk."""
    shutil.rmtree(_temporary(root, step, token), ignore_errors=True)


def drop_unfinished(root: Path) -> None:
    """Delete what killed processes left half written. No process may be writing into this directory."""
    for entry in root.iterdir() if root.is_dir() else ():
        if re.fullmatch(r"step-\d+\.tmp-.*", entry.name) and not (entry / MANIFEST).exists():
            shutil.rmtree(entry, ignore_errors=True)


def parts_are_there(root: Path, step: int, token: str, ranks: Iterable[int]) -> bool:
    """Whether every rank's :func:`write_rank` under ``token`` has returned."""
    folder = _temporary(root, step, token)
    return all((folder / _part_name(rank)).exists() for rank in ranks)


def is_settled(root: Path, step: int, token: str) -> bool:
    """Whether what was written under ``token`` is committed: for a rank that wrote its part and does not commit."""
    return not _temporary(root, step, token).exists() and (step_dir(root, step) / MANIFEST).exists()


def step_of(path: Path) -> int | None:
    """The step that a committed checkpoint's folder is named after; None for any other name."""
    match = _STEP_DIR.fullmatch(path.name)
    return int(match.group(1)) if match else None


def steps_present(root: Path) -> list[int]:
    """Steps of the committed checkpoints, newest first; unfinished ones are not counted."""
    if not root.is_dir():
        return []
    found = [_STEP_DIR.fullmatch(entry.name) for entry in root.iterdir() if entry.is_dir()]
    return sorted((int(m.group(1)) for m in found if m), reverse=True)


@dataclass(frozen=True, slots=True)
class FoundCheckpoints:
    """The committed checkpoints of a directory: those of which every byte is as it was written, and why others are not.

    A checkpoint that was never completed is in neither: it has no ``step-N`` name.
    """

    whole: dict[int, CheckpointManifest]
    altered: dict[int, VerificationError]

    def newer_altered(self, step: int) -> VerificationError | None:
        """What is wrong with the newest altered checkpoint after ``step``: resuming from ``step`` would hide it."""
        after = [n for n in self.altered if n > step]
        return self.altered[max(after)] if after else None


def survey(root: Path, *, run: str = "") -> FoundCheckpoints:
    """Read every byte of every committed checkpoint (which must be of ``run``)."""
    whole: dict[int, CheckpointManifest] = {}
    altered: dict[int, VerificationError] = {}
    for step in steps_present(root):
        try:
            whole[step] = verify_step(root, step, run=run)
        except VerificationError as error:
            altered[step] = error
    return FoundCheckpoints(whole, altered)


def set_aside(root: Path, after: int, *, also: Iterable[Path] = ()) -> Path | None:
    """Move checkpoints of steps after ``after`` out of the way; returns the folder beside ``root``, None if none was.

    ``also``: files that will be cut to that step; they are copied there first. Nothing is deleted. Safe to repeat.
    """
    later = [step for step in steps_present(root) if step > after]
    if not later:
        return None
    number = 1
    while (aside := root.parent / f"aside{number}_{root.name}").exists():
        number += 1
    try:
        aside.mkdir(mode=0o700)
        for path in also:
            if path.exists():
                shutil.copy2(path, aside / path.name)
        for step in sorted(later, reverse=True):  # the newest first: what is left is always a prefix
            os.rename(step_dir(root, step), step_dir(aside, step))
        files.fsync_dir(aside)
        files.fsync_dir(root)
    except OSError as error:
        raise files.write_failed(aside, error) from error
    return aside


def latest_verified(
    root: Path,
    *,
    run: str = "",
    not_after: int | None = None,
    on_bad: Callable[[Path, VerificationError], object] = lambda path, error: None,
) -> CheckpointManifest | None:
    """The newest checkpoint that verifies (of ``run``, not after a step), or None. ``on_bad`` hears of the others."""
    for step in steps_present(root):
        if not_after is not None and step > not_after:
            continue
        try:
            return verify_step(root, step, run=run)
        except VerificationError as error:
            on_bad(step_dir(root, step), error)
    return None


def prune(root: Path, keep: int) -> list[int]:
    """Delete what is older than the newest ``keep`` verified checkpoints; returns the steps deleted.

    A broken checkpoint does not count as kept, and stays until ``keep`` verified ones are newer than it. Remains of
    interrupted writes up to the newest verified step go too.
    """
    if keep < 1:
        raise ConfigError(f"cannot keep {keep} checkpoints", "keep at least 1, better 2")
    verified: list[int] = []
    deleted: list[int] = []
    for step in steps_present(root):
        if len(verified) >= keep:
            _delete(root, step)
            deleted.append(step)
            continue
        try:
            verify(step_dir(root, step))
            verified.append(step)
        except VerificationError:
            continue
    for entry in root.iterdir() if verified else ():
        rest = re.fullmatch(r"step-(\d+)\.(?:tmp|old)-.*", entry.name)
        if rest and int(rest.group(1)) <= verified[0]:
            shutil.rmtree(entry, ignore_errors=True)
    return deleted


def _delete(root: Path, step: int) -> None:
    """Take the name first: a process killed on the way leaves remains, not a checkpoint that looks altered."""
    gone = root / f"step-{step}.old-{uuid.uuid4().hex[:12]}"
    try:
        os.rename(step_dir(root, step), gone)
    except OSError as error:
        raise files.write_failed(gone, error) from error
    shutil.rmtree(gone, ignore_errors=True)


def _same(folder: Path, sha256: str) -> CheckpointManifest | None:
    try:
        return verify(folder, sha256)
    except VerificationError:
        return None


def _temporary(root: Path, step: int, token: str) -> Path:
    return root / f"step-{step}.tmp-{token}"


def _part_name(rank: int) -> str:
    return f"MANIFEST.rank{rank}.json"


def _write_file(folder: Path, name: str, content: Content) -> dict[str, Any]:
    """Write, fsync and describe one file; the hash is of what was read back."""
    path = folder / checked_name(name)
    if path.exists():
        raise UvccError(f"two ranks write {path}", "give each file its rank in the name")
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as f:
        os.fsync(f.fileno())
        while chunk := f.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return {"bytes": size, "sha256": digest.hexdigest()}
