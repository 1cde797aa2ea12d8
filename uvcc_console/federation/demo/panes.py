"""The tmux layout of a federated demo: a pane for each domain, one for the owners, one for the auditor."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from uvcc_console.federation.demo.people import AUDITOR, DOMAINS, OWNERS, Scene
from uvcc_engine.contract.errors import ConfigError, UvccError

PANES = (*((name,) for name in DOMAINS), OWNERS, (AUDITOR,))


def required() -> str:
    """The tmux program. Raises ConfigError with how to get it."""
    found = shutil.which("tmux")
    if found is None:
        hint = "apt install tmux, dnf install tmux or brew install tmux; --headless needs none"
        raise ConfigError("--tmux needs tmux, which is not installed", hint)
    return found


def server(stage: Scene) -> tuple[str, ...]:
    """The tmux server of this demo alone; its socket lies among the demo's temporary files."""
    return (required(), "-S", str(stage.temp / "tmux"), "-f", os.devnull)


def layout(stage: Scene, columns: int = 160, lines: int = 50) -> None:
    """Start the server with its five panes; nobody looks at them yet. Raises UvccError."""
    first, *others = [_pane(stage, names) for names in PANES]
    size = ("-x", str(columns), "-y", str(lines))
    _tmux(stage, "new-session", "-d", "-s", "demo", *size, *first)
    for command in others:
        _tmux(stage, "split-window", "-t", "demo", *command)
        _tmux(stage, "select-layout", "-t", "demo", "tiled")
    for names, title in (("remain-on-exit", "on"), ("mouse", "on")):
        _tmux(stage, "set-option", "-g", names, title)


def _pane(stage: Scene, names: Sequence[str]) -> tuple[str, ...]:
    uid = stage.people[names[0]].uid
    module = (sys.executable, "-m", "uvcc_console.federation.demo.pane")
    return (*module, str(stage.folder), ",".join(names), str(-1 if uid is None else uid), str(stage.temp))


def _tmux(stage: Scene, *command: str) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TMUX"} | {"UVCC_HOME": str(stage.folder)}
    done = subprocess.run((*server(stage), *command), env=env, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise UvccError(f"tmux {command[0]}: {done.stderr.strip()[:200]}", "--headless needs no tmux")
