"""Names inside a run directory, and the only ways in which its files are written and read. Standard library only.

A document (``exit.json``, ``.HALT``, a manifest) is replaced as a whole by rename, so a reader sees the old or the new
one and never a part. A log grows by whole lines, each written with one system call; a line that could not be written
completely is cut off again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError
from uvcc_engine.contract.parsing.untrusted import load_json

RUN_JSON: Final = "run.json"
RUN_INFO: Final = "run.info"
TRAINING: Final = "training.csv"
VAL: Final = "val.csv"
VAL_COLUMNS: Final = ("step", "loss", "ppl")
EVENTS: Final = "events.jsonl"
HALT: Final = ".HALT"
LINK: Final = "link.json"
CHECKPOINTS: Final = "checkpoints"
METRICS: Final = "metrics.json"
TENSORBOARD: Final = "tb"
ENV_JSON: Final = "env.json"
SAMPLE: Final = "sample.txt"
SAMPLE_SHOWN: Final = 400  # characters of it, in its event and on a screen
STEPS_REPEATED: Final = "steps_repeated"  # the event that tells how steps came out that a resume did again
ROLLED_BACK: Final = "rolled_back"  # and the one that tells of a training that went back by itself
LONGEST_DOCUMENT: Final = 64 << 20

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FULL_DISK: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def heartbeat_name(rank: int) -> str:
    return f"heartbeat_rank{rank}.jsonl"


def exit_name(rank: int, *, lead: bool = True) -> str:
    """``exit.json`` of the lead rank of a directory; the others that share it have one each."""
    return "exit.json" if lead else f"exit_rank{rank}.json"


def result_name(rank: int, *, lead: bool = True) -> str:
    """``result.json`` of the lead rank of a directory; the others that share it have one each."""
    return "result.json" if lead else f"result_rank{rank}.json"


DOMAIN_KEY: Final = "domain.pub"
"""In the agent's root: the key of the domain that this pod obeys, as its bootstrap wrote it."""


def least_attempt_name(coord: str) -> str:
    """Where a worker leaves word that it needs a higher attempt: ``{"least": N}``."""
    return f"least_attempt_{coord}.json"


def is_heartbeat(name: str) -> bool:
    """Whether a file holds the heartbeats of a rank."""
    return name.startswith("heartbeat_rank")


def is_exit(name: str) -> bool:
    """Whether a file is a worker's exit record, as :func:`exit_name` names it."""
    return name.startswith("exit") and name.endswith(".json")


def is_result(name: str) -> bool:
    """Whether a file is a worker's result, as :func:`result_name` names it."""
    return name.startswith("result") and name.endswith(".json")


HEARTBEATS: Final = "heartbeat_rank*.jsonl"
EXITS: Final = "exit*.json"
RESULTS: Final = "result*.json"
LOGS: Final = "worker_*.log"
STACKDUMPS: Final = "stackdump_*.txt"
SINK_LOGS: Final = "sink_*.log"
"""Patterns of what the functions here name."""


def log_name(coord: str) -> str:
    """Standard output and error of one worker."""
    return f"worker_{coord}.log"


SINK_FOLDERS: Final = ("wandb", "mlruns")
"""What a training's sinks write into its run directory where no service takes it."""


def sink_log(name: str) -> str:
    """Standard output and error of the process of one of a training's sinks."""
    return f"sink_{name}.log"


def is_worker_log(name: str) -> bool:
    """Whether a file is a worker's log, as :func:`log_name` names it."""
    return name.startswith("worker_") and name.endswith(".log")


def stackdump_name(coord: str) -> str:
    """Where SIGUSR1 leaves the stacks of a worker's threads."""
    return f"stackdump_{coord}.txt"


def checked_run_id(run: str) -> str:
    """The run id, if it can safely name a directory. Raises ConfigError otherwise."""
    if not _RUN_ID.fullmatch(run):
        raise ConfigError(f"not a run id: {run!r}", "use letters, digits, '.', '_' and '-', at most 128")
    return run


def run_id_of(folder: Path) -> str:
    """The run id of a folder that a person named: its name, with a ``-`` for each run of characters that no id has."""
    fits = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).lstrip("._-")
    return fits[:128] or "run"


def write_failed(path: Path, error: OSError) -> UvccError:
    """The error of a write that did not happen, with a hint at what stopped it."""
    if error.errno in _FULL_DISK:
        hint = "free space on this disk, then resume from the last checkpoint"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "make the directory writable for this user, or choose another one"
    else:
        hint = "check the disk and the directory"
    return UvccError(f"cannot write {path}: {error.strerror or error}", hint)


def fsync_dir(path: Path) -> None:
    """Make renames inside a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(root: Path) -> None:
    """Make every file and folder below ``root`` durable; links are not followed.

    Raises UvccError naming what the disk did not take.
    """
    for folder, _, names in os.walk(root):
        for path in (*(Path(folder, name) for name in names), Path(folder)):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:
                continue  # a link, or gone meanwhile: nothing of it lies here
            try:
                if stat.S_IFMT(os.fstat(fd).st_mode) in (stat.S_IFREG, stat.S_IFDIR):
                    os.fsync(fd)
            except OSError as error:
                raise write_failed(path, error) from error
            finally:
                os.close(fd)


def sync_data(fd: int) -> None:
    """Make a file's content durable; its times need not be. Raises OSError."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:  # macOS
        os.fsync(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write every byte or raise OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def append_synced(path: Path, row: Mapping[str, Any], hint: str) -> None:
    """Add one line of JSON, for the owner alone, and have it on disk before this returns.

    Raises UvccError with ``hint`` if the disk refuses. The line before may have been cut short: ours begins on its own.
    """
    line = f"\n{json.dumps(row)}\n".encode()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            if os.write(fd, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as e:
        raise UvccError(f"cannot write {path}: {e.strerror}", hint) from e


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644, durable: bool = True) -> None:
    """Replace ``path`` by ``data``: all of it or nothing. Raises UvccError naming the file, with a hint."""
    temporary = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:12]}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            write_all(fd, data)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
        if durable:
            fsync_dir(path.parent)
    except OSError as error:
        discard(temporary)
        raise write_failed(path, error) from error


def discard(partial: Path) -> None:
    """Remove what was not written whole, as well as it goes: a disk that takes no writes lets nothing be removed,
    either, not even a file that is not there."""
    with contextlib.suppress(OSError):
        partial.unlink()


def write_json(path: Path, value: Mapping[str, Any], *, mode: int = 0o644, durable: bool = True) -> None:
    """A JSON document of one line, replaced atomically."""
    data = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode() + b"\n"
    write_atomic(path, data, mode=mode, durable=durable)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON document. Raises UnreadableError if it is missing, cut short or not an object."""
    try:
        found = load_json(path.read_bytes(), LONGEST_DOCUMENT)
    except OSError as error:
        raise UnreadableError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UnreadableError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UnreadableError(f"{path} is not a JSON object")
    return found


def read_json_of_run(path: Path, run: str) -> dict[str, Any] | None:
    """A result or exit document of exactly this run; None if it is absent, unreadable or of an earlier run."""
    try:
        found = read_json(path)
    except UnreadableError:
        return None
    return found if found.get("run") == run else None


class LineFile:
    """A growing file of whole lines. Opening it cuts off a last line that a dead writer left unfinished."""

    def __init__(self, path: Path, header: str = "") -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._cut_unfinished()
            if header and os.fstat(self._fd).st_size == 0:
                self.append(header)
        except OSError as error:
            raise write_failed(path, error) from error

    def append(self, line: str) -> None:
        """One line, without its newline. Raises UvccError; what was written of it is taken back."""
        data = line.encode() + b"\n"
        try:
            written = os.write(self._fd, data)
            if written != len(data):
                self._take_back(written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise write_failed(self.path, error) from error

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def truncate(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise write_failed(self.path, error) from error

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _take_back(self, written: int) -> None:
        """Only if nobody has appended since, which other ranks of the directory may have."""
        end = os.lseek(self._fd, 0, os.SEEK_CUR)
        if os.fstat(self._fd).st_size == end:
            os.ftruncate(self._fd, end - written)

    def _cut_unfinished(self) -> None:
        size = end = os.fstat(self._fd).st_size
        while end > 0:
            start = max(0, end - 65536)
            newline = os.pread(self._fd, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end != size:
            os.ftruncate(self._fd, end)
