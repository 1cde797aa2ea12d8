"""Old runs: how large they are, packing one away and unpacking it, deleting one. Never one that somebody conducts."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from uvcc_console.core import paths, pod_states
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.fleet.claims import Claims
from uvcc_console.fleet.cloud import intents
from uvcc_engine.contract.errors import UnreadableError, UvccError
from uvcc_engine.contract.run_files.files import discard
from uvcc_engine.contract.text import counted

ARCHIVES: Final = "archive"
_PACKED: Final = ".tar.gz"


def size_of(folder: Path) -> int:
    """Bytes of every file below a folder; what vanishes meanwhile counts nothing."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(base, name)).st_size
            except OSError:
                continue
    return total


def size_words(size: float) -> str:
    """A size in bytes for a reader: ``812 kB``, ``3.4 MB``, ``1.2 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return ""


def cannot_go(s: Snapshot, live: bool) -> str:
    """Why a run must stay; empty where it may go."""
    if live:
        return "somebody conducts it: tear it down first"
    left = [p.pod for p in s.pods.values() if p.state not in pod_states.ABSENT]
    if left and s.status != "unreadable":
        return f"{len(left)} of its pods are not proven gone: uvcc teardown first"
    if s.leaks:
        return "it left pods behind: uvcc pods --sweep first"
    return "" if s.ended or s.status == "unreadable" else "it has not ended: uvcc teardown first"


def must_stay(run_dir: Path, s: Snapshot, live: bool) -> str:
    """The same, also from the books that were kept of what was asked of providers; empty where the run may go.

    A journal that cannot be read says nothing about pods: those books do.
    """
    if why := cannot_go(s, live):
        return why
    pods = [*intents.Intents.of(run_dir).open(""), *(name for name, _ in Claims.of(run_dir).open())]
    if pods:
        return f"{pods[0]} may still be there and cost money: uvcc pods --sweep first"
    if volumes := intents.unended(run_dir):
        return f"its volume {volumes[0].name} may still be there and cost money: uvcc pods --sweep first"
    return ""


def delete(run_dir: Path) -> None:
    """The run's folder and all that is in it. Raises UvccError."""
    if run_dir.parent != paths.runs_dir() or run_dir.is_symlink():
        raise UvccError(f"{run_dir} is no run of this machine")
    gone = run_dir.with_name(f".{run_dir.name}.deleted")
    try:
        run_dir.rename(gone)  # at once out of every list, however long the rest takes
        shutil.rmtree(gone)
    except OSError as e:
        raise UvccError(f"cannot delete {run_dir.name}: {e.strerror}") from e


@contextlib.contextmanager
def _opened(packed: Path) -> Iterator[tarfile.TarFile]:
    """A packed run, which is read to its end: its check sum comes last, where ``tarfile`` does not look."""
    with gzip.open(packed) as plain:
        with tarfile.open(fileobj=plain, mode="r:") as found:
            yield found
        while plain.read(1 << 20):
            pass


def archive(run_dir: Path) -> Path:
    """The run as one packed file beside the runs; its folder goes once that is read back. Raises UvccError."""
    folder = paths.ensure(paths.data_dir() / ARCHIVES)
    packed, partial = folder / f"{run_dir.name}{_PACKED}", folder / f".{run_dir.name}.partial"
    wanted = sum(len(names) for _, _, names in os.walk(run_dir))
    try:
        with tarfile.open(partial, "w:gz") as out:
            out.add(run_dir, run_dir.name)
        with _opened(partial) as back:
            found = sum(not member.isdir() for member in back)
        if found != wanted:
            raise UvccError(f"{run_dir.name} changed while it was packed", "try again once nothing writes to it")
        partial.replace(packed)
    except (OSError, tarfile.TarError, EOFError, zlib.error) as e:
        discard(partial)
        raise UvccError(f"cannot archive {run_dir.name}: {e}") from e
    except UvccError:
        discard(partial)
        raise
    delete(run_dir)
    return packed


def archived() -> dict[str, int]:
    """Run -> bytes of its packed file, of every run that was packed away."""
    found = sorted((paths.data_dir() / ARCHIVES).glob(f"[!.]*{_PACKED}"))
    return {path.name.removesuffix(_PACKED): path.stat().st_size for path in found if path.is_file()}


def none_here() -> tuple[str, str]:
    """What to say where there is no run, and what to do about it."""
    if packed := len(archived()):
        said = f"there are no runs here: {counted(packed, 'run was', 'runs were')} packed away"
        return said, "see: uvcc runs --archived; uvcc runs --unpack RUN brings one back"
    return "there are no runs yet", "start one with: uvcc demo"


def packed_hint(name: str) -> str:
    """What to do about a run of this name, or beginning, that was packed away; empty where none was."""
    found = [run for run in archived() if name and run.startswith(name)]
    if name in found or len(found) == 1:
        run = name if name in found else found[0]
        return f"{run} was packed away: uvcc runs --unpack {run} brings it back"
    return f"{len(found)} that begin so were packed away: uvcc runs --archived" if found else ""


def unpack(name: str) -> Path:
    """The folder of a run that was packed away, back among the runs; the packed file goes then. ``name``: all of it, or
    the beginning of one. Raises UvccError."""
    known = archived()
    fits = [name] if name in known else [run for run in known if name and run.startswith(name)]
    if len(fits) != 1:
        what = f"{name[:80]!r} fits {len(fits)} runs" if fits else f"no run {name[:80]} was packed away"
        raise UvccError(what, "see: uvcc runs --archived")
    name = fits[0]
    packed = paths.data_dir() / ARCHIVES / f"{name}{_PACKED}"
    wanted = paths.run_dir(name)
    if wanted.exists():
        raise UvccError(f"there is a run {name} already", f"move {packed} elsewhere, or delete the run first")
    partial = paths.ensure(paths.runs_dir()) / f".{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with _opened(packed) as found:
            found.extractall(partial, filter="data")
        inner = partial / name
        if not inner.is_dir() or [p.name for p in partial.iterdir()] != [name]:
            raise UnreadableError(f"{packed} holds no run {name}")
        inner.rename(wanted)
    except (OSError, tarfile.TarError, EOFError, zlib.error) as e:
        raise UnreadableError(f"cannot unpack {packed}: {e}") from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    packed.unlink()
    return wanted
