"""What a checkpoint holds, and its proof: the manifest, read as whoever wrote it may have altered it, and every byte.

``checkpoint`` beside it says how a checkpoint is written; this module says whether one that lies there may be used.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

from uvcc_engine.contract.errors import ConfigError, VerificationError
from uvcc_engine.contract.parsing.canonical import sorted_json
from uvcc_engine.contract.parsing.safepaths import shown

MANIFEST: Final = "MANIFEST.json"
MANIFEST_BYTES: Final = 64 << 20
FORMAT: Final = 1
CHUNK: Final = 4 << 20
EARLIER: Final = "put it back as it was, or decide to go on from an earlier one: uvcc resume RUN --from STEP"
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


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
        if text_of(whole) != raw or whole["body_sha256"] != sha256_of(text_of(body)):
            raise VerificationError("checkpoint", f"{folder / MANIFEST} was altered", EARLIER)
        if body["format"] != FORMAT:
            raise VerificationError("checkpoint", f"{folder} has format {body['format']}, this version reads {FORMAT}")
        ranks = {int(rank): _state(part) for rank, part in body["ranks"].items()}
        return CheckpointManifest(
            path=folder,
            sha256=sha256_of(raw),
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


def verify_step(root: Path, step: int, *, run: str = "") -> CheckpointManifest:
    """:func:`verify` for the checkpoint named after ``step``, which must say so itself, and be of ``run``."""
    folder = step_dir(root, step)
    manifest = verify(folder)
    if manifest.step != step:
        raise VerificationError("checkpoint", f"{folder} holds step {manifest.step}", "it was renamed")
    if run and manifest.run != run:
        raise VerificationError("checkpoint", f"{folder} is of run {manifest.run}", f"wanted {run}")
    return manifest


def text_of(value: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest, or of a part of one."""
    return sorted_json(value).encode()


def sha256_of(data: bytes) -> str:
    """The hash of a manifest's bytes, in hex."""
    return hashlib.sha256(data).hexdigest()
