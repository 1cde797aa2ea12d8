"""How far an identity has gone under each set of masks: what was begun once is never begun again over less.

A party that repeats an epoch under the same masks is safe only while it holds every message that it received the first
time: a peer's altered repeat, accepted, would tell that peer a factor of what the mask hides. So the identity's folder
keeps, for each session and coordinate, a mark: the attempt, the run directory, and the epochs that may have been begun.
Whoever starts in another directory, over a transcript that is shorter than its mark, or after a proof that did not
hold, needs the next attempt, whose masks are others.

What it needs lies in ``least_attempt_<coord>.json`` of the run directory, where the console finds it.

``<name>.json`` is fsynced and reserves epochs ahead, many at once; ``<name>.begun`` says exactly how many were begun
and is with the operating system only: it counts within one boot of the machine, as the transcript's newest leaves do.
After another boot a transcript must hold all that was reserved, which a run that was halted in good order does.
"""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, NoReturn

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.machine.host import boot_id
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.run_files import files

FOLDER: Final = "marks"
AHEAD: Final = 64
"""Epochs reserved at once: one fsync for so many steps."""
_BEGUN: Final = struct.Struct("<Q")


class RepeatError(ConfigError):
    """This start would repeat epochs that its transcript does not bind; ``least`` is the attempt that repeats none."""

    def __init__(self, what: str, least: int) -> None:
        super().__init__(what, f"uvcc resume RUN starts attempt {least} on all pods: other masks, from the first step")
        self.least = least


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What is durable. ``directory``: from the identity's folder; ``reserved``: epochs that may have been begun;
    ``refuted``: a proof of this attempt did not hold, so it is not gone on with."""

    attempt: int
    directory: str
    boot: str
    reserved: int
    refuted: bool = False


class HighWaterMark:
    """The mark of one running worker. Nothing of an epoch is sent before :meth:`begin` has noted it."""

    def __init__(self, path: Path, mark: Mark, begun: int, demand: Path) -> None:
        """See :meth:`claim`."""
        self._path, self._mark, self._demand = path, mark, demand
        self._fd = os.open(path.with_suffix(".begun"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._begun = begun

    @classmethod
    def claim(cls, identity_dir: Path, session: str, coord: Coord, attempt: int, directory: Path) -> HighWaterMark:
        """Take up an attempt of a session. Raises RepeatError if it was begun elsewhere, or a later one was begun.

        ``session`` is the session id in hex. Raises UnreadableError for a mark that cannot be read.
        """
        folder = identity_dir / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        path, demand = folder / f"{session}_{coord}.json", directory / files.least_attempt_name(str(coord))
        where = os.path.relpath(directory.resolve(), identity_dir.resolve())
        with open(folder / "lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = _read(path)
            if known is not None and attempt <= known.attempt:
                _check(known, attempt, where, demand)
                return cls(path, known, _begun(path, known), demand)
            fresh = cls(path, Mark(attempt=attempt, directory=where, boot=boot_id(), reserved=0), 0, demand)
            fresh._note_begun(0)
            fresh._keep(fresh._mark)
            return fresh

    @property
    def same_boot(self) -> bool:
        """Whether this machine surely kept its power since the mark was written: what a killed process had handed to
        the operating system is then there."""
        return bool(self._mark.boot) and self._mark.boot == boot_id()

    def admit(self, finalised: int, left_open: int) -> None:
        """Hold the transcript against the mark: its finalised epochs, and the epoch that it holds open (-1: none).

        Raises RepeatError where it lacks one that may have been begun.
        """
        if self.same_boot:
            last = self._begun - 1
            lacks, due = finalised < last or (finalised == last and left_open != last), self._begun
            why = "its files were taken back or removed"
        else:
            lacks, due = finalised < self._mark.reserved, self._mark.reserved
            why = "as after a power cut"
        if lacks:
            what = f"the transcript holds {finalised} epochs of the {due} that this identity may have begun in attempt"
            _refuse(self._demand, f"{what} {self._mark.attempt}: {why}", self._mark.attempt + 1)
        if self._mark.boot != boot_id():
            self._note_begun(finalised)
            self._keep(replace(self._mark, boot=boot_id()))

    def begin(self, epoch: int) -> None:
        """Note an epoch before anything of it is sent. Raises UvccError if that cannot be made durable."""
        if epoch < self._begun:
            return
        if epoch >= self._mark.reserved:
            self._keep(replace(self._mark, reserved=epoch + AHEAD))
        self._note_begun(epoch + 1)

    def refute(self) -> None:
        """Never go on with this attempt: who lied in it may tell the truth when it is repeated, under the same masks,
        and the two together would give it a factor of what they hide."""
        self._keep(replace(self._mark, refuted=True))
        files.write_json(self._demand, {"least": self._mark.attempt + 1})

    def settle(self) -> None:
        """Reserve no more than what was begun. Call once the transcript is durable, and nothing more is begun."""
        self._keep(replace(self._mark, reserved=self._begun))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _keep(self, mark: Mark) -> None:
        files.write_json(self._path, asdict(mark), mode=0o600)
        self._mark = mark

    def _note_begun(self, count: int) -> None:
        try:
            os.pwrite(self._fd, _BEGUN.pack(count), 0)
        except OSError as e:
            raise files.write_failed(self._path, e) from e
        self._begun = count


def _check(known: Mark, attempt: int, where: str, demand: Path) -> None:
    if where != known.directory:
        what = f"attempt {known.attempt} of this session was begun in {known.directory}, not in {where}"
        _refuse(demand, what, known.attempt + 1)
    if known.refuted:
        _refuse(demand, f"a proof of attempt {known.attempt} did not hold", known.attempt + 1)
    if attempt < known.attempt:
        _refuse(demand, f"attempt {known.attempt} of this session was begun here before {attempt}", known.attempt)


def _refuse(demand: Path, what: str, least: int) -> NoReturn:
    """Leave word of the attempt that is needed, for whoever starts the next one."""
    files.write_json(demand, {"least": least})
    raise RepeatError(what, least)


def _read(path: Path) -> Mark | None:
    if not path.exists():
        return None
    try:
        return strict.read(Mark, files.read_json(path), "a high-water mark")
    except (ConfigError, UnreadableError) as e:
        hint = "this identity may repeat what it does not know of: make a new one for new sessions"
        raise UnreadableError(f"{path} is no high-water mark: {e.what}", hint) from e


def _begun(path: Path, mark: Mark) -> int:
    """Exactly how many epochs were begun; all that are reserved where that was lost."""
    try:
        return int(_BEGUN.unpack(path.with_suffix(".begun").read_bytes())[0])
    except (OSError, struct.error):
        return mark.reserved
