"""Ctrl-Z: the terminal goes back to the shell until its ``fg``. The run, its conductor and its sidecar go on."""

from __future__ import annotations

import os

STAYS = "no shell waits for this console: q leaves it, and uvcc attach comes back"


def shell_waits() -> bool:
    """Whether a shell with job control started this process. Nobody else would take the terminal, or wake the console:
    what a script, or tmux by itself, has started would stand still for good."""
    parent = os.getppid()
    try:
        return os.getsid(parent) == os.getsid(0) and os.getpgid(parent) != os.getpgrp()
    except OSError:  # it has ended
        return False
