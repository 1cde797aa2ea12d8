"""Starting a run and its detached processes, and telling whether they live. Used by the command line and the TUI."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.log import logger
from uvcc_console.core.paths import ADOPTED, DOMAIN
from uvcc_console.fleet import pulse
from uvcc_console.fleet.procs import LocalProcess, alive, identify
from uvcc_console.fleet.runclock import RunClock
from uvcc_console.runs.order import enrol
from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.machine import extras
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.contract.run_files.files import discard

if TYPE_CHECKING:
    from uvcc_console.plan.plan import Plan

log = logger(__name__)
JOURNAL = paths.JOURNAL
CONDUCTOR, HALTD = "conductor", "haltd"
STARTING_S = 20.0
_MODULES = {CONDUCTOR: "uvcc_console.rollout.conductor", HALTD: "uvcc_console.haltd"}
_FOLLOWING = "uvcc_console.follow.adopted"  # of a run that is only followed: conductor and sidecar in one
_own: set[Path] = set()  # the records that this process has left


class _Log(io.RawIOBase):
    """Standard error of a detached process: its log file. A disk that does not take a line loses it, no more."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            os.write(2, data)
        return len(data)


def speak_at_any_cost() -> None:
    """Call first in a detached process: what it says past its logger must not end it."""
    sys.stderr = io.TextIOWrapper(cast(BinaryIO, _Log()), errors="backslashreplace", write_through=True)


def write_record(run_dir: Path, name: str) -> None:
    """Say which process this one is: ``<name>.json`` with pid and start time, by atomic rename.

    A full disk keeps nobody from being what it is: then the record of the one before is overwritten where it lies.
    """
    _own.add(run_dir / f"{name}.json")
    me = identify(os.getpid())
    record = json.dumps({"pid": os.getpid(), "starttime": me.starttime if me else 0, "started": time.time()})
    partial = run_dir / f".{name}.json.{os.getpid()}"
    try:
        partial.write_text(record)
        partial.replace(run_dir / f"{name}.json")
    except OSError as e:
        discard(partial)
        log.warning("the record of this %s is written in place: %s", name, e)
        with contextlib.suppress(OSError), (run_dir / f"{name}.json").open("r+") as file:
            file.write(record)
            file.truncate()


def renew_record(run_dir: Path, name: str) -> None:
    """Call now and then: say anew which process this is, where it has said so and somebody has removed that.

    Who starts another one in the very moment in which this one leaves its record takes it for a dead one's.
    """
    record = run_dir / f"{name}.json"
    if record in _own and run_dir.is_dir() and not record.exists():
        write_record(run_dir, name)


def recorded(run_dir: Path, name: str) -> LocalProcess | None:
    """Who said last to be the run's conductor or haltd; it may have ended since."""
    try:
        record: dict[str, Any] = json_of((run_dir / f"{name}.json").read_text())
        return LocalProcess(int(record["pid"]), int(record["starttime"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def running(run_dir: Path, name: str) -> int:
    """The pid of the run's conductor or haltd if exactly that process lives, frozen or not, else 0."""
    who = recorded(run_dir, name)
    return who.pid if who is not None and alive(who) else 0


def living(run_dir: Path) -> bool:
    """Whether the run's conductor or its halt sidecar lives."""
    return bool(running(run_dir, CONDUCTOR) or running(run_dir, HALTD))


def vital(run_dir: Path, name: str) -> pulse.Vital:
    """Whether the run's conductor or haltd moves, is frozen, or is dead."""
    return pulse.vital(run_dir, name, recorded(run_dir, name))


def conducted(run_dir: Path) -> bool:
    """Whether a conductor lives or is just being started: it has said nothing yet, but not for long."""
    if running(run_dir, HALTD if (run_dir / DOMAIN).exists() else CONDUCTOR):
        return True
    fresh = time.time() - run_dir.stat().st_mtime < STARTING_S
    return fresh and not (run_dir / f"{CONDUCTOR}.json").exists()


def going(run_dir: Path, created: float, now: float) -> bool:
    """Whether somebody conducts a run that has not ended, or is just being started: it waits a while for a conductor.

    ``created`` and ``now``: seconds of the wall clock. A folder's own times tell nothing to who reads the journal, for
    that changes them.
    """
    if running(run_dir, HALTD if (run_dir / DOMAIN).exists() else CONDUCTOR):
        return True
    return now - created < STARTING_S and not (run_dir / f"{CONDUCTOR}.json").exists()


def start(run_dir: Path, name: str, *args: str) -> subprocess.Popen[bytes]:
    """Start the conductor or haltd of a run, detached: own session, no terminal. ``<name>.log`` takes its output."""
    if name == CONDUCTOR and (run_dir / DOMAIN).exists():
        raise ConfigError(
            f"{run_dir.name} is one domain's console", "the operator resumes and tears down; F9 halts here"
        )
    if not running(run_dir, name):
        (run_dir / f"{name}.json").unlink(missing_ok=True)  # of one that died: nobody shall take it for an end
    module = _FOLLOWING if (run_dir / ADOPTED).exists() else _MODULES[name]
    command = [sys.executable, "-m", module, run_dir.name, *args]
    try:
        with (run_dir / f"{name}.log").open("ab") as out:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                close_fds=True,
                cwd=run_dir,
            )
    except OSError as e:
        raise UvccError(f"cannot start the {name} of {run_dir.name}: {e}", f"is {run_dir} writable?") from e


def end_run(run_dir: Path, status: str, detail: str) -> None:
    """Close a run of which nothing was started."""
    journal = Journal(run_dir / JOURNAL, source="cli")
    journal.append(ev.RunEnded(status=status, detail=detail))
    journal.close()


def _nobody(_: str) -> None:
    """Who is not told."""


def claim_folder(word: str) -> Path:
    """Make the folder of a new run, whose name is the run's id and begins with ``word``.

    Raises UvccError where it cannot be made.
    """
    from uvcc_console.plan.plan import new_run_id

    while True:
        folder = paths.run_dir(new_run_id(word))
        paths.ensure(folder.parent)
        try:
            folder.mkdir(mode=0o700)
            enrol(folder)
            return folder
        except FileExistsError:
            continue
        except OSError as e:
            raise UvccError(f"cannot create {folder}: {e.strerror}", "set UVCC_HOME to a writable folder") from e


@contextlib.contextmanager
def new_folder(word: str) -> Iterator[Path]:
    """The folder of a new run (``claim_folder``) while it is filled; it goes again where it cannot be.

    Raises UvccError for a disk that is full or refuses.
    """
    folder = claim_folder(word)
    try:
        yield folder
    except BaseException as e:
        shutil.rmtree(folder, ignore_errors=True)
        disk = e if isinstance(e, OSError) else e.__cause__
        if isinstance(e, OSError) or isinstance(disk, sqlite3.Error):
            why = getattr(disk, "strerror", None) or disk
            hint = "free disk space, or set UVCC_HOME to a writable folder"
            raise UvccError(f"cannot write the new run {folder}: {why}", hint) from e
        raise


def create_run(
    profile_name: str,
    settings: Iterable[str] = (),
    *,
    seed: int | None = None,
    name: str = "",
    patient: bool = False,
    tell: Callable[[str], None] = _nobody,
    part: Callable[[Plan], Plan] | None = None,
) -> Path:
    """Plan a rollout and write it down: a new run folder whose journal holds ``RunCreated``. Nothing is started.

    ``seed``, ``patient``: see ``RunCreated``; ``name``: first word of the run id instead of the profile's; ``tell`` is
    given what the operator should know of the plan; ``part`` takes from it what is done from here.

    Raises ConfigError for a bad profile, UvccError where the folder cannot be written.
    """
    from uvcc_console.fleet.provider_kinds import runs_here, sections
    from uvcc_console.plan import code_tree, long_steps, plan_rehearsal, worker_secrets
    from uvcc_console.plan.owndata import keep_base, keep_pin, settle
    from uvcc_console.plan.plan import make_plan, new_run_id
    from uvcc_console.plan.profile import load
    from uvcc_console.plan.schema import CommandJobSettings
    from uvcc_console.runs import kept_pods

    short, profile = load(profile_name, settings)
    profile, pin = settle(kept_pods.with_kept_key(profile), tell, elsewhere=part is not None)
    worker_secrets.values(profile.secrets)  # before anything is made or rented
    job = profile.job
    code = code_tree.survey(job) if isinstance(job, CommandJobSettings) and job.code else None
    for left in code.left_out if code is not None else ():
        tell(f"not uploaded: {left}")
    here = any(runs_here(part) for part in sections(profile.fleet.model_dump(mode="json")))
    if here:
        extras.require("torch", "local pods compute on this machine")
    draft = make_plan(new_run_id(name or short), short, profile, seed)
    if part is not None:
        part(draft)  # refused before there is a folder
    step = None
    if plan_rehearsal.own(draft):
        try:
            step = plan_rehearsal.rehearsed(draft)
        except ConfigError:
            raise
        except UvccError as error:  # pods that are other machines may have what this one lacks
            if here:
                raise
            tell(f"the run is not foretold: {error.what}")
    if step is None and plan_rehearsal.applies(draft):
        step = plan_rehearsal.kept(draft)
    took = plan_rehearsal.promise(draft, step).seconds if step is not None else 0.0
    profile, notes = long_steps.fitted(profile, took)
    for note in (*(step["warnings"] if step is not None else ()), *notes):
        tell(note)
    with new_folder(name or short) as folder:
        run = folder.name
        keep_pin(folder, pin)
        keep_base(folder, profile)
        if code is not None:
            code_tree.keep(code, folder)
        plan = make_plan(run, short, profile, seed)
        plan = part(plan) if part is not None else plan
        begun = folder / f".{JOURNAL}"  # who ends in between leaves no journal that looks like a damaged one
        journal = Journal(begun, source="cli")
        journal.append(
            ev.RunCreated(
                run=run,
                profile_name=short,
                job_kind=profile.job.kind,
                replicas=profile.topology.replicas,
                pipeline_stages=profile.topology.stages,
                tensor=profile.topology.tensor,
                stages=list(plan.stages),
                profile=profile.model_dump(mode="json"),
                seed=seed,
                patient=patient,
                apart=part is not None,
            )
        )
        if step is not None:
            journal.append(plan_rehearsal.promise(plan, step))
        journal.close()
        begun.rename(folder / JOURNAL)
        RunClock(folder)  # it starts here, where the wall clock says when the run was born
    return folder
