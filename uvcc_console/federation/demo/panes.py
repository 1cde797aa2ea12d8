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
_SAY_ID = ("-P", "-F", "#{pane_id}")


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
    """Start the server with its five panes; nobody looks at them yet. Raises UvccError.

    A quarter each for the domains, whose consoles fit at 160x50; owners and auditor share the last one.
    """
    alpha, beta, gamma, owners, auditor = (_pane(stage, names) for names in PANES)
    size = ("-x", str(columns), "-y", str(lines))
    ids = [_tmux(stage, "new-session", "-d", "-s", "demo", *size, *_SAY_ID, *alpha)]
    for name, value in (
        ("remain-on-exit", "on"),
        ("mouse", "on"),
        ("pane-border-status", "top"),
        ("pane-border-format", " #{@who} "),
    ):
        _tmux(stage, "set-option", "-g", name, value)
    ids.append(_tmux(stage, "split-window", "-h", "-t", ids[0], *_SAY_ID, *beta))
    ids.append(_tmux(stage, "split-window", "-v", "-t", ids[0], *_SAY_ID, *gamma))
    ids.append(_tmux(stage, "split-window", "-v", "-t", ids[1], *_SAY_ID, *owners))
    ids.append(_tmux(stage, "split-window", "-v", "-t", ids[3], *_SAY_ID, *auditor))
    for pane, names in zip(ids, PANES, strict=True):
        _tmux(stage, "set-option", "-p", "-t", pane, "@who", " and ".join(names))


def _pane(stage: Scene, names: Sequence[str]) -> tuple[str, ...]:
    uid = stage.people[names[0]].uid
    module = (sys.executable, "-m", "uvcc_console.federation.demo.pane")
    return (*module, str(stage.folder), ",".join(names), str(-1 if uid is None else uid), str(stage.temp))


def _tmux(stage: Scene, *command: str) -> str:
    """What a command of tmux prints. Raises UvccError."""
    # a caller's COLUMNS and LINES would hide a pane's own size from what runs in it
    kept = {k: v for k, v in os.environ.items() if k not in ("TMUX", "COLUMNS", "LINES")}
    env = kept | {"UVCC_HOME": str(stage.folder)}
    done = subprocess.run((*server(stage), *command), env=env, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise UvccError(f"tmux {command[0]}: {done.stderr.strip()[:200]}", "--headless needs no tmux")
    return done.stdout.strip()
