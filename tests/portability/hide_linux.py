"""Hides from Python what only Linux has, so that what a Mac would run runs here.

Imported at the start of every process of an environment made by ``make_env.py``: the tests, the console, local pods,
their agents and workers. Gone are /proc (but for psutil, which needs none on a Mac), epoll, eventfd, pidfd, pipe2,
waitid, the scheduling calls, preallocation, fdatasync, the clock since boot, TCP_USER_TIMEOUT and prctl. What libraries
do in C is out of reach.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import io
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

_GONE: dict[Any, tuple[str, ...]] = {
    os: (
        *("pidfd_open", "eventfd", "eventfd_read", "eventfd_write", "EFD_NONBLOCK", "EFD_CLOEXEC", "pipe2", "waitid"),
        *("posix_fallocate", "posix_fadvise", "fdatasync", "memfd_create", "splice", "copy_file_range"),
        *(name for name in dir(os) if name.startswith(("sched_", "SCHED_"))),
    ),
    select: tuple(name for name in dir(select) if name.lower().startswith("epoll")),
    socket: ("TCP_USER_TIMEOUT",),
    time: ("CLOCK_BOOTTIME", "pthread_getcpuclockid"),
}
_LIBC = ("prctl", "mallopt")
_BOOT = "/proc/sys/kernel/random/boot_id"
"""A Mac names its boots, too (sysctl): a machine that did not would refuse to go on with any transcript."""


def _hidden(path: object) -> bool:
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    if not isinstance(path, str | os.PathLike):
        return False
    text = os.fspath(path)
    return isinstance(text, str) and text != _BOOT and (text == "/proc" or text.startswith("/proc/"))


def _for_psutil() -> bool:
    frame, looked = sys._getframe(2), 0
    while frame is not None and looked < 6:
        if frame.f_globals.get("__name__", "").startswith("psutil"):
            return True
        frame, looked = frame.f_back, looked + 1
    return False


def _without_proc(call: Callable[..., Any]) -> Callable[..., Any]:
    def asked(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        if _hidden(path) and not _for_psutil():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return call(path, *args, **kwargs)

    for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if call in able:
            able.add(asked)
    return asked


def hide() -> None:
    """Once per process."""
    for module, names in _GONE.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    if "selectors" in sys.modules:  # else it finds out by itself
        selectors = sys.modules["selectors"]
        vars(selectors).pop("EpollSelector", None)
        vars(selectors)["DefaultSelector"] = vars(selectors)["PollSelector"]
    io.open = builtins.open = _without_proc(builtins.open)  # type: ignore[assignment]
    for name in ("open", "listdir", "scandir", "stat", "lstat", "readlink"):
        setattr(os, name, _without_proc(getattr(os, name)))
    ask = ctypes.CDLL.__getattr__

    def function(library: ctypes.CDLL, name: str) -> Any:
        if name in _LIBC:
            raise AttributeError(name)
        return ask(library, name)

    ctypes.CDLL.__getattr__ = function  # type: ignore[method-assign]


hide()
