"""The people of a federated demo: each with a home, processes and, where this program is root, an OS user of its own.

The users are bare numbers without an entry in the user database, as systemd's dynamic users are: the kernel keeps them
apart like any others, and there is none to be removed afterwards, however the demo ends.
"""

from __future__ import annotations

import os
import pwd
import secrets
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import psutil

from uvcc_console.core import paths
from uvcc_console.fleet.local_provider import temp_root
from uvcc_console.plan.exit_words import ended_how
from uvcc_engine.contract.errors import ConfigError, UvccError

DOMAINS: Final = ("alpha", "beta", "gamma")
OWNERS: Final = ("north", "south")
RELAY: Final = "relay"
AUDITOR: Final = "auditor"
EVERYBODY: Final = (*DOMAINS, *OWNERS, RELAY, AUDITOR)
WHO: Final = {
    **{name: f"domain of P{party}" for party, name in enumerate(DOMAINS)},
    **{name: f"data owner {number}" for number, name in enumerate(OWNERS)},
    RELAY: "runs the relay",
    AUDITOR: "auditor, three public keys",
}
MAIN: Final = (sys.executable, "-m", "uvcc_console.cli.main")
FIRST_UID: Final = 62_000
_SETS: Final = 300


@dataclass(frozen=True, slots=True)
class Person:
    """``uid``: the OS user, None where all share the one that runs this program."""

    name: str
    home: Path
    temp: Path
    uid: int | None = None

    def environment(self) -> dict[str, str]:
        """What this person's processes see: nothing of the settings or the SSH agent of whoever runs the demo."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("UVCC_", "SSH_", "TMUX"))}
        own = {"HOME": self.home, "UVCC_HOME": self.home, "TMPDIR": self.temp, "USER": self.name, "LOGNAME": self.name}
        strict = {"UVCC_STRICT": os.environ["UVCC_STRICT"]} if "UVCC_STRICT" in os.environ else {}
        return kept | {name: str(value) for name, value in own.items()} | strict

    def start(
        self, command: Sequence[str], *, out: int | IO[str] = subprocess.PIPE, terminal: bool = False
    ) -> subprocess.Popen[str]:
        """Start a command as this person; with the ``terminal`` of whoever runs the demo, or detached from it.

        Raises UvccError where the system starts none.
        """
        try:
            return subprocess.Popen(
                command,
                env=self.environment(),
                cwd=self.home,
                umask=0o077,
                user=self.uid,
                group=self.uid,
                extra_groups=None if self.uid is None else (),
                stdin=None if terminal else subprocess.DEVNULL,
                stdout=None if terminal else out,
                stderr=None if terminal else subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=not terminal,
            )
        except OSError as e:
            raise UvccError(f"cannot start {command[0]} as {self.name}: {e}", "is this machine overloaded?") from e

    def give(self, path: Path, text: str) -> None:
        """Write a private file of this person's."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(text)
        self.owns(path)

    def owns(self, path: Path) -> None:
        """See that a file, or all of a folder, belongs to this person."""
        if self.uid is None:
            return
        for below in (path, *(path.rglob("*") if path.is_dir() else ())):
            os.chown(below, self.uid, self.uid, follow_symlinks=False)


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a demo takes place. ``how``: the line that says what keeps its people apart; ``claim``: the folder that
    keeps their user numbers, None where they have none."""

    folder: Path
    temp: Path
    people: dict[str, Person]
    how: str
    claim: Path | None = None

    @property
    def public(self) -> Path:
        """What everybody may read: public keys, and the program of the model."""
        return self.folder / "public"


def set_up(*, users: bool) -> Scene:
    """Make the homes. ``users``: insist on OS users of their own.

    Raises ConfigError where that is asked for and not possible, UvccError where a folder cannot be written.
    """
    token = secrets.token_hex(4)
    temp = _folder(temp_root() / f"uvd-{token}")  # short: sockets lie below it
    why_not = _why_no_users(temp)
    if users and why_not:
        temp.rmdir()
        raise ConfigError(f"OS users of their own are not possible: {why_not}", "without --users: separate homes")
    try:
        claim, first = (None, None) if why_not else lease()
        # another user passes through a folder above its home; through the root user's own folders it does not
        folder = _folder(temp / "people" if first is not None else paths.data_dir() / "federated" / token)
    except UvccError:
        temp.rmdir()
        raise
    for shared in (temp, folder, folder / "public"):
        shared.mkdir(exist_ok=True)
        shared.chmod(0o755 if first is not None else 0o700)
    people = {}
    for n, name in enumerate(EVERYBODY):
        person = Person(name, folder / name, temp / name, None if first is None else first + n)
        for own in (person.home, person.temp):
            own.mkdir(mode=0o700)
            person.owns(own)
        people[name] = person
    if first is None:
        how = f"separate homes of one OS user ({why_not})"
    else:
        how = f"separate OS users, {first} to {first + len(people) - 1}: bare numbers, no user is created"
    return Scene(folder, temp, people, how, claim)


def _folder(path: Path) -> Path:
    paths.ensure(path)
    if not os.access(path, os.W_OK | os.X_OK):
        raise UvccError(f"cannot write below {path}", "set UVCC_HOME to a writable folder")
    return path


def _why_no_users(temp: Path) -> str:
    """Why this program cannot run something as another user; empty where it can."""
    if os.geteuid() != 0:
        return "this program is not root"
    probe = Person("probe", temp, temp, FIRST_UID)
    temp.chmod(0o755)
    try:
        started = probe.start((sys.executable, "-c", "import uvcc_console.cli.main, uvcc_engine.cli"))
        said, _ = started.communicate(timeout=60)
    except (UvccError, subprocess.TimeoutExpired) as e:
        return "another user cannot run this Python" if isinstance(e, UvccError) else "another user's Python hangs"
    last = said.strip().splitlines()[-1:] or [ended_how("it", started.returncode)]
    return "" if started.returncode == 0 else f"uvcc cannot be read by another user: {last[0][:120]}"


def lease() -> tuple[Path, int]:
    """The first of enough user numbers that nobody has, and the empty folder that keeps them for this demo."""
    for first in range(FIRST_UID, FIRST_UID + _SETS * 10, 10):
        claim = temp_root() / f"uvcc-users-{first}"
        try:
            claim.mkdir(mode=0o700)
        except FileExistsError:
            continue
        if not _taken(range(first, first + len(EVERYBODY))):
            return claim, first
        claim.rmdir()
    raise UvccError("no user numbers are free", f"{FIRST_UID} and above are looked at; end the demos that run")


def _taken(numbers: range) -> bool:
    """Whether the user database knows one of them, or a process runs as one."""
    known = {entry.pw_uid for entry in pwd.getpwall()}
    running = set()
    for process in psutil.process_iter():
        try:
            running.add(process.uids().real)
        except psutil.Error:
            continue
    return bool((known | running) & set(numbers))
