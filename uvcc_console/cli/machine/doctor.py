"""``uvcc doctor``: is this machine and terminal fit, and is nothing left behind? Each finding with its hint."""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from uvcc_console.cli import common
from uvcc_console.cli.main import FAILED, OK
from uvcc_console.core import paths, settings
from uvcc_console.fleet.strays import end as end_strays
from uvcc_console.fleet.strays import find as find_strays
from uvcc_engine.contract.errors import UvccError

MIN_DISK_MIB = 2048
MIN_MEMORY_MIB = 3072


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """level: ok | warn | error. Only errors keep a run from starting."""

    name: str
    level: str
    found: str
    hint: str = ""


def python() -> MachineCheck:
    good = sys.version_info >= (3, 11)
    return MachineCheck(
        "python", "ok" if good else "error", platform.python_version(), "" if good else "use 3.11 or newer"
    )


def system() -> MachineCheck:
    good = sys.platform in ("linux", "darwin")
    hint = "" if good else "the console and its local pods are made for Linux and macOS"
    return MachineCheck("system", "ok" if good else "warn", platform.platform(), hint)


def terminal(env: Mapping[str, str], tty: bool) -> MachineCheck:
    term = env.get("TERM", "")
    if not tty:
        return MachineCheck("terminal", "warn", "no terminal", "the console needs one; --headless does not")
    if term in ("", "dumb"):
        return MachineCheck("terminal", "warn", f"TERM={term or 'unset'}", "export TERM=xterm-256color")
    return MachineCheck("terminal", "ok", term)


def colours(env: Mapping[str, str]) -> MachineCheck:
    if "NO_COLOR" in env:
        return MachineCheck("colours", "ok", "NO_COLOR: states are told by glyph and word")
    if env.get("COLORTERM") in ("truecolor", "24bit"):
        return MachineCheck("colours", "ok", "24 bit")
    if "256" in env.get("TERM", ""):
        return MachineCheck("colours", "ok", "256")
    return MachineCheck("colours", "warn", "16 or fewer", "export TERM=xterm-256color, or COLORTERM=truecolor")


def utf8() -> MachineCheck:
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    good = encoding == "utf8"
    return MachineCheck("utf-8", "ok" if good else "warn", encoding or "unknown", "" if good else "export LANG=C.UTF-8")


def size() -> MachineCheck:
    columns, lines = shutil.get_terminal_size((80, 24))
    good = columns >= 80 and lines >= 24
    return MachineCheck("size", "ok" if good else "warn", f"{columns}x{lines}", "" if good else "at least 80x24")


def tmux(env: Mapping[str, str]) -> MachineCheck:
    inside = "TMUX" in env
    note = "inside tmux" if inside else "not inside tmux"
    return MachineCheck("tmux", "ok", note, "" if inside else "in tmux a lost connection leaves the console open")


def ssh_keygen() -> MachineCheck:
    path = shutil.which("ssh-keygen")
    hint = "" if path else "install OpenSSH to check signatures by hand; uvcc verify does not need it"
    return MachineCheck("ssh-keygen", "ok" if path else "warn", path or "not found", hint)


def data_folder() -> MachineCheck:
    try:
        folder = paths.ensure(paths.data_dir())
        probe = folder / f".doctor-{os.getpid()}"
        try:
            probe.write_text("x")
        finally:
            probe.unlink(missing_ok=True)  # a full disk takes its name, and nothing more
    except UvccError as e:
        return MachineCheck("data folder", "error", e.what, e.hint)
    except OSError as e:
        return MachineCheck("data folder", "error", f"{folder}: {e}", "set UVCC_HOME to a writable folder")
    return MachineCheck("data folder", "ok", str(folder))


def disk() -> MachineCheck:
    try:
        folder: Path = paths.data_dir()
    except UvccError:
        return MachineCheck("disk", "warn", "not looked at: there is no data folder")
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free >> 20
    good = free >= MIN_DISK_MIB
    return MachineCheck(
        "disk", "ok" if good else "error", f"{free} MiB free", "" if good else f"free {MIN_DISK_MIB} MiB"
    )


def memory() -> MachineCheck:
    free = psutil.virtual_memory().available >> 20
    good = free >= MIN_MEMORY_MIB
    return MachineCheck(
        "memory", "ok" if good else "warn", f"{free} MiB available", "" if good else "a demo takes about 2.5 GiB"
    )


def computing() -> MachineCheck:
    """What the demo and local pods need; pods elsewhere bring their own."""
    missing = [name for name in ("torch", "numba") if importlib.util.find_spec(name) is None]
    if not missing:
        return MachineCheck("local pods", "ok", "torch and numba are installed")
    lacking = f"{' and '.join(missing)} not installed"
    slower = "local pods are slower without it" if missing == ["numba"] else "the demo and local pods need torch"
    return MachineCheck("local pods", "warn", lacking, f"{slower}: pip install 'uvcc[local]'")


def left_behind() -> MachineCheck:
    """Processes of dead parents and of runs whose folder is gone."""
    strays = find_strays()
    if not strays:
        return MachineCheck("processes", "ok", "none left behind")
    shown = "; ".join(f"{s.what}, pid {s.process.pid}: {s.why}" for s in strays)
    return MachineCheck("processes", "warn", shown, "end them with: uvcc doctor --end-strays")


def own_settings() -> MachineCheck:
    """The operator's own settings: whether they can be read, and whether there are such a theme and program."""
    try:
        found = settings.effective()
    except UvccError as e:
        return MachineCheck("settings", "warn", e.what, e.hint or "see: uvcc config")
    command = shlex.split(str(found["notify_command"].value))
    if command and shutil.which(command[0]) is None:
        missing = f"notify_command: there is no program {command[0]!r}"
        return MachineCheck("settings", "warn", missing, "nobody is notified by it")
    theme = str(found["theme"].value)
    if theme:
        from uvcc_console.ui.drawing.theme import is_theme  # it takes Textual's list, which takes its time

        if not is_theme(theme):
            unknown = f"there is no theme {theme!r}, as {found['theme'].source} asks for"
            return MachineCheck("settings", "warn", unknown, "the usual one is shown; :theme in the console lists them")
    return MachineCheck("settings", "ok", str(settings.path()) if settings.path().exists() else "as usual")


def findings(env: Mapping[str, str], tty: bool) -> list[MachineCheck]:
    """Every check, in reading order."""
    checks: list[Callable[[], MachineCheck]] = [
        python,
        system,
        lambda: terminal(env, tty),
        lambda: colours(env),
        utf8,
        size,
        lambda: tmux(env),
        ssh_keygen,
        data_folder,
        own_settings,
        disk,
        memory,
        computing,
        left_behind,
    ]
    return [check() for check in checks]


def run(argv: list[str]) -> int:
    parser = common.Parser("doctor", "Check this machine and terminal. Exits 1 if no run could start.")
    parser.add_argument(
        "--end-strays", action="store_true", help="end processes whose parent or whose run's folder is gone"
    )
    parser.add_json()
    args = parser.parse_args(argv)
    if args.end_strays:
        strays = find_strays()
        stubborn = end_strays(strays)
        for stray in strays:
            word = "would not end" if stray in stubborn else "ended"
            common.say(f"{word}: {stray.what}, pid {stray.process.pid} ({stray.why})")
    found = findings(os.environ, sys.stdout.isatty() and sys.stdin.isatty())
    if args.json:
        common.emit([asdict(f) for f in found])
    else:
        mark = {"ok": "+", "warn": "!", "error": "x"}
        for f in found:
            common.show(f"{mark[f.level]} {f.name:<12} {f.found}" + (f"   -> {f.hint}" if f.hint else ""))
    return FAILED if any(f.level == "error" for f in found) else OK
