"""``uvcc verify``: the transcript verifier. For a run of this operator, whom to expect is in that run's own journal."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import stat
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.journal.journal_file import opened
from uvcc_console.core.paths import JOURNAL
from uvcc_console.report import collector, received
from uvcc_console.report.record import identities, pins_of_identities
from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.proof import cli, package
from uvcc_engine.transcript.signing.signers import AllowedSigners
from uvcc_engine.transcript.signing.sshsig import COLLECTOR

_WAIT_S = 2.0
_MOST_EVENTS = 1_000_000
_MOST_BYTES = 64 * reading.KIB  # of one event about a pod or a phase


def own_run(path: Path) -> Path | None:
    """The folder of this operator's run in which ``path`` really lies, links resolved; None if it lies elsewhere."""
    runs, real = Path(os.path.realpath(paths.runs_dir())), Path(os.path.realpath(path))
    if real == runs or not real.is_relative_to(runs):
        return None
    run_dir = runs / real.relative_to(runs).parts[0]
    try:
        return run_dir if stat.S_ISREG(os.lstat(run_dir / JOURNAL).st_mode) else None
    except OSError:
        return None


def pins_of(path: Path) -> package.ExpectedSigners | None:
    """Whom the journal of this operator's run around ``path`` names; None where ``path`` lies in no such run.

    The identities of a phase are those that the pods had shown over SSH when the phase was last started. Raises
    UnreadableError if the journal cannot be read.
    """
    run_dir = own_run(path)
    if run_dir is None:
        return None
    told = _told(run_dir / JOURNAL)
    if not pins_of_identities(identities(told)):
        return None
    key = collector.public_line()

    @cache
    def of(phase: str) -> AllowedSigners:
        keys = pins_of_identities(identities(told, phase)) | ({COLLECTOR: key} if key else {})
        return AllowedSigners.of(keys, f"the journal of {run_dir.name}")

    return package.ExpectedSigners(
        f"identities pinned by the journal of this operator's run {reading.shown(run_dir.name)}", of
    )


def _told(journal: Path) -> list[ev.Event]:
    """What a journal says of pods and phases; waits for no lock, and is read only."""
    words = (ev.PodChanged.kind, ev.PodVouched.kind, ev.PhaseStarted.kind)
    try:
        db = opened(journal, _WAIT_S, mode="ro")
        try:
            rows = db.execute(
                "SELECT kind, ts, data FROM events WHERE kind IN (?, ?, ?) AND length(data) <= ? ORDER BY seq LIMIT ?",
                (*words, _MOST_BYTES, _MOST_EVENTS),
            )
            return [e for kind, ts, data in rows if (e := _event(kind, ts, data)) is not None]
        finally:
            db.close()
    except (sqlite3.Error, ValueError, TypeError, RecursionError) as e:
        hint = "name whom you expect with --allowed-signers"
        raise UnreadableError(f"cannot read the journal {reading.shown(journal)}: {reading.reason(e)}", hint) from e


def _event(kind: str, ts: float, data: str) -> ev.Event | None:
    fields = json.loads(data)
    if not isinstance(fields, dict):
        raise ValueError(f"an event of kind {kind} is not an object")
    found = ev.from_json(kind, ts, fields)
    if isinstance(found, ev.PodChanged | ev.PodVouched) and not all(
        isinstance(v, str) for v in (found.pod, found.identity)
    ):
        raise ValueError("an event about a pod names it by no text")
    return found


def run_verify(argv: Sequence[str], resolve: Callable[[str], Path] = Path) -> int:
    """The verb, with the exit codes of :mod:`uvcc_engine.transcript.proof.cli`. ``resolve``: a run's name -> folder.

    A package that is still packed is unpacked into a folder that is gone afterwards.
    """
    with contextlib.ExitStack() as folders:

        @cache
        def found(word: str) -> Path:
            path = resolve(word)
            return folders.enter_context(received.unpacked(path)) if received.is_archive(path) else path

        return cli.main(argv, pins=lambda path: pins_of(found(str(path))), resolve=found, prog="uvcc verify")
