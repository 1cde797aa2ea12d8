"""Checkpoints that are whole or absent, and proved before they are believed. Standard library only.

``checkpoints/step-N/`` holds the files of every rank of this directory (``rank{N}.safetensors`` and others) and
``MANIFEST.json``, which names each with size and SHA-256. All is written to ``step-N.tmp-<token>/``, fsynced, renamed
in one step, and the parent fsynced; so a directory without the suffix is complete, and a reader still checks every
byte. One rank per directory calls :func:`save`. Several ranks call :func:`write_rank` with one agreed token, then one
of them, after a barrier, :func:`commit`.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

from uvcc_engine.contract import files
from uvcc_engine.contract.canonical import sorted_json
from uvcc_engine.contract.errors import ConfigError, UvccError, VerificationError
from uvcc_engine.contract.safepaths import shown

MANIFEST: Final = "MANIFEST.json"
MANIFEST_BYTES: Final = 64 << 20
FORMAT: Final = 1
CHUNK: Final = 4 << 20
EARLIER: Final = "put it back as it was, or decide to go on from an earlier one: uvcc resume RUN --from STEP"
Content = bytes | Callable[[Path], object]
"""A file's bytes, or a function that writes the file at the path it is given."""

_STEP_DIR = re.compile(r"step-([0-9]{1,15})")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One rank's part: its files as {name: {bytes, sha256}} and what it needs to go on exactly where it was."""

    rank: int
    coord: str
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    epoch_root: str = ""
    cursors: dict[str, Any] = field(default_factory=dict)
    rng: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def described(self) -> dict[str, tuple[int, str]]:
        """Its files as {name: (bytes, sha256)}. A manifest may come from anybody: raises VerificationError for names
        that lead elsewhere and for sizes and sums that are none."""
        found: dict[str, tuple[int, str]] = {}
        if not isinstance(self.files, dict):
            raise VerificationError("checkpoint", f"rank {self.rank} describes no files of a checkpoint", EARLIER)
        for name, said in self.files.items():
            size, digest = (said.get("bytes"), said.get("sha256")) if isinstance(said, dict) else (None, None)
            named = isinstance(name, str) and _FILE_NAME.fullmatch(name) and not name.startswith("MANIFEST")
            if not named or type(size) is not int or size < 0 or not isinstance(digest, str):
                raise VerificationError("checkpoint", f"{str(name)[:80]!r} is no file of a checkpoint", EARLIER)
            found[name] = (size, digest)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """What a verified checkpoint holds. ``sha256`` of the manifest file names the checkpoint everywhere else."""

    path: Path
    sha256: str
    run: str
    step: int
    topology: dict[str, Any]
    ranks: dict[int, RankState]

    def rank(self, rank: int) -> RankState:
        """One rank's part. Raises VerificationError if the checkpoint has none."""
        if rank not in self.ranks:
            raise VerificationError(
                "checkpoint", f"{self.path} holds no state of rank {rank}", "was the topology changed?"
            )
        return self.ranks[rank]


def step_dir(root: Path, step: int) -> Path:
    return root / f"step-{step}"


def rank_file(rank: int) -> str:
    """The usual name of a rank's tensors."""
    return f"rank{rank}.safetensors"


def checked_name(name: Any) -> str:
    """The name, if a checkpoint's file can have it: one part, nothing that leads elsewhere. Raises ConfigError."""
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or name.startswith("MANIFEST"):
        raise ConfigError(f"not a checkpoint file name: {shown(name)}", "use letters, digits, '.', '_' and '-'")
    return name


def checked_file(name: str, described: Any) -> dict[str, Any]:
    """Size and hash of a file as a manifest describes it. Raises ConfigError if they are none."""
    size = described.get("bytes") if isinstance(described, dict) else None
    sha256 = described.get("sha256") if isinstance(described, dict) else None
    if type(size) is not int or not 0 <= size < 1 << 62 or not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ConfigError(f"{shown(name)} is described without its size and hash", "use an earlier checkpoint")
    return {"bytes": size, "sha256": sha256}


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
        shutil.rmtree(_temporary(root, step, token), ignore_errors=True)
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
    files.write_atomic(folder / _part_name(state.rank), _text(part))


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
    files.write_atomic(folder / MANIFEST, _text({"body": body, "body_sha256": _sha256(_text(body))}))
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


def parts_are_there(root: Path, step: int, token: str, ranks: Iterable[int]) -> bool:
    """Whether every rank's :func:`write_rank` under ``token`` has returned."""
    folder = _temporary(root, step, token)
    return all((folder / _part_name(rank)).exists() for rank in ranks)


def is_settled(root: Path, step: int, token: str) -> bool:
    """Whether what was written under ``token`` is committed: for a rank that wrote its part and does not commit."""
    return not _temporary(root, step, token).exists() and (step_dir(root, step) / MANIFEST).exists()


def read_manifest(folder: Path) -> CheckpointManifest:
    """The manifest alone, checked against itself; the files are not read. Raises VerificationError."""
    try:
        with _regular(folder / MANIFEST) as f:
            raw = f.read(MANIFEST_BYTES + 1)
    except OSError as error:
        raise VerificationError("checkpoint", f"{folder} has no manifest: {error.strerror}", EARLIER) from error
    if len(raw) > MANIFEST_BYTES:
        raise VerificationError("checkpoint", f"{folder / MANIFEST} is longer than {MANIFEST_BYTES} bytes")
    try:
        whole = json.loads(raw)
        body = whole["body"]
        if _text(whole) != raw or whole["body_sha256"] != _sha256(_text(body)):
            raise VerificationError("checkpoint", f"{folder / MANIFEST} was altered", EARLIER)
        if body["format"] != FORMAT:
            raise VerificationError("checkpoint", f"{folder} has format {body['format']}, this version reads {FORMAT}")
        ranks = {int(rank): _state(part) for rank, part in body["ranks"].items()}
        return CheckpointManifest(
            path=folder,
            sha256=_sha256(raw),
            run=body["run"],
            step=body["step"],
            topology=body["topology"],
            ranks=ranks,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigError) as error:
        raise VerificationError("checkpoint", f"{folder / MANIFEST} is damaged", EARLIER) from error


def _state(part: Mapping[str, Any]) -> RankState:
    """A rank's part of a manifest; its files lie beside the manifest and nowhere else."""
    found = RankState(**part)
    for name, described in found.files.items():
        checked_file(checked_name(name), described)
    return found


def _regular(path: Path) -> BinaryIO:
    """Open a file that must be one, whatever somebody put in its place: no link, no pipe, no device."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(fd, "rb")


def verify(folder: Path, sha256: str = "") -> CheckpointManifest:
    """Read every byte of a checkpoint and check it; ``sha256`` = the manifest hash it must have, if known.

    Raises VerificationError naming the first file that is missing or altered.
    """
    steps = verify_in_steps(folder, sha256)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            manifest: CheckpointManifest = done.value
            return manifest


def verify_in_steps(folder: Path, sha256: str = "") -> Generator[None, None, CheckpointManifest]:
    """:func:`verify` for a caller that has other work: yields after every 4 MiB read."""
    manifest = read_manifest(folder)
    if sha256 and manifest.sha256 != sha256:
        raise VerificationError("checkpoint", f"{folder} is another checkpoint than the one named", "look at the step")
    for state in manifest.ranks.values():
        for name, wanted in state.described().items():
            path = folder / name
            digest, size = hashlib.sha256(), 0
            try:
                with _regular(path) as f:
                    while size <= wanted[0] and (chunk := f.read(CHUNK)):
                        digest.update(chunk)
                        size += len(chunk)
                        yield
            except OSError as error:
                raise VerificationError("checkpoint", f"{path} cannot be read: {error.strerror}", EARLIER) from error
            if (size, digest.hexdigest()) != wanted:
                raise VerificationError("checkpoint", f"{path} was altered", EARLIER)
    return manifest


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


def verify_step(root: Path, step: int, *, run: str = "") -> CheckpointManifest:
    """:func:`verify` for the checkpoint named after ``step``, which must say so itself, and be of ``run``."""
    folder = step_dir(root, step)
    manifest = verify(folder)
    if manifest.step != step:
        raise VerificationError("checkpoint", f"{folder} holds step {manifest.step}", "it was renamed")
    if run and manifest.run != run:
        raise VerificationError("checkpoint", f"{folder} is of run {manifest.run}", f"wanted {run}")
    return manifest


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


def _text(value: Mapping[str, Any]) -> bytes:
    return sorted_json(value).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
