"""The auditor's package: everything of a run in one archive, with a verifier that needs no code of ours.

Beside what a run hands over anyway lie ``index.html`` (for the eye), ``HOWTO.md`` (for the hand), ``EVIDENCE.md`` (the
format) and ``verify.py``; the manifest covers them like every other file.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tarfile
import zipfile
from importlib.resources import files
from pathlib import Path
from typing import IO, Final

from uvcc_console.core.log import logger
from uvcc_console.report import collector, publishing, recording, timestamps
from uvcc_console.report.figures import Figures, write_figures
from uvcc_console.report.handoff import handoff, write_handoff
from uvcc_console.report.howto import howto
from uvcc_console.report.logbundle import write_bundle
from uvcc_console.report.package import Package
from uvcc_console.report.page import page
from uvcc_console.report.received import zstandard_module
from uvcc_console.report.record import RunRecord
from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError
from uvcc_engine.contract.machine.extras import MissingExtraError
from uvcc_engine.contract.run_files.files import discard
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.proof import manifest

log = logger(__name__)

TAR: Final = ".uvcc.tar.zst"
ZIP: Final = ".uvcc.zip"
FORMATS: Final = {"tar.zst": TAR, "zip": ZIP}
_OURS: Final = {"verify.py": "standalone_verify.py", "EVIDENCE.md": "EVIDENCE.md"}
_CHUNK: Final = reading.MIB


def write_package(
    run_dir: Path,
    kind: str = "tar.zst",
    out: Path | None = None,
    timestamp: str = "",
    log_to: publishing.PublicLog | None = None,
) -> tuple[Path, Figures]:
    """Complete a run's artifacts and pack them; returns the archive and what was drawn.

    ``timestamp``: the service that dates what has no stamp yet (see :mod:`timestamps`); ``log_to``: the log in which
    is entered what was not (see :mod:`publishing`).
    ``kind``: ``tar.zst`` (needs zstandard) or ``zip``. Raises ConfigError for a run that proves nothing,
    UnreadableError for one whose bundles cannot be read,
    RedactionError if a log holds what looks like a secret, UvccError if the disk refuses, VerificationError naming a
    file that was changed since the manifest was signed.
    """
    if kind not in FORMATS:
        raise ConfigError(f"no format {kind!r}", f"one of: {', '.join(FORMATS)}")
    record = RunRecord.load(run_dir)
    for phase, why in () if record.bundles else record.unread.items():
        raise UnreadableError(f"the proof bundle of phase {phase} cannot be read: {why.what}", why.hint)
    if not record.bundles:
        raise ConfigError(
            f"{run_dir.name} has no readable proof bundle", "package a private run whose phase is verified"
        )
    read = Package(record)  # the journal is folded, and every phase verified, once for all that is written from here on
    drawn = _figures(record)
    write_bundle(run_dir, package=read)
    write_handoff(run_dir, made=handoff(run_dir, package=read))
    with collector.renewing(run_dir) as written:
        for phase in record.bundles if timestamp else ():
            for name in timestamps.STAMPED:
                written.append(asyncio.run(timestamps.stamp(record.artifacts / phase / name, timestamp)))
        if log_to is not None:
            for phase in record.bundles:
                written += asyncio.run(_entered(log_to, record.artifacts / phase))
        proof = files("uvcc_engine.transcript.proof")
        texts = {name: (proof / source).read_bytes() for name, source in _OURS.items()}
        texts["HOWTO.md"] = howto(read).encode()
        texts["index.html"] = page(read).encode()
        texts[recording.NAME] = recording.recording(record)
        for name, data in texts.items():
            written.append(_write(record.artifacts / name, data))
    if not manifest.is_there(record.artifacts):
        collector.seal(run_dir)
    path = out or Path.cwd() / f"{run_dir.name}{FORMATS[kind]}"
    pack_folder(record.artifacts, run_dir.name, path, kind)
    log.info("packed into %s", path, run=run_dir.name)
    return path, drawn


async def _entered(log_to: publishing.PublicLog, folder: Path) -> list[Path]:
    return [await log_to.enter_policy(folder), await log_to.enter_run(folder)]


def _figures(record: RunRecord) -> Figures:
    try:
        return write_figures(record.run_dir, record=record)
    except MissingExtraError as e:
        return Figures(skipped={"all": f"{e.what}: {e.hint}"})


def _write(path: Path, data: bytes) -> Path:
    temporary = path.with_name(path.name + ".part")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as e:
        raise UvccError(f"cannot write {path}: {e.strerror}", "free disk space and repeat") from e
    return path


# ---- packing -------------------------------------------------------------------------------------------------------


def pack_folder(root: Path, name: str, path: Path, kind: str) -> None:
    """Everything below ``root`` under the folder ``name``, in order, nothing of this machine; as a whole or not."""
    partial = path.with_name(path.name + ".part")
    try:
        with partial.open("wb") as out:
            if kind == "zip":
                _zip(root, name, out)
            else:
                _tar(root, name, out)
        os.replace(partial, path)
    except OSError as e:
        raise UvccError(f"cannot write {path}: {e.strerror}", "free disk space, or name another file") from e
    finally:
        discard(partial)


def _zip(root: Path, name: str, out: IO[bytes]) -> None:
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for each in sorted(reading.tree(root, manifest.MOST_FILES).files):
            entry = zipfile.ZipInfo(f"{name}/{each}", (1980, 1, 1, 0, 0, 0))
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            with archive.open(entry, "w", force_zip64=True) as target, (root / each).open("rb") as source:
                shutil.copyfileobj(source, target, _CHUNK)


def _tar(root: Path, name: str, out: IO[bytes]) -> None:
    packer = zstandard_module().ZstdCompressor(level=6).stream_writer(out, closefd=False)
    with packer, tarfile.open(fileobj=packer, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for each in sorted(reading.tree(root, manifest.MOST_FILES).files):
            entry = tarfile.TarInfo(f"{name}/{each}")
            entry.size, entry.mode = (root / each).stat().st_size, 0o644
            with (root / each).open("rb") as source:
                archive.addfile(entry, source)
