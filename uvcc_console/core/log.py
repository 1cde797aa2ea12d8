"""Structured logging: every line says of which run, pod, halt and stage it speaks, and is one JSON object.

A module takes its adapter once, ``log = logger(__name__)``, and names what a line is about: ``log.warning("the link is
lost", pod=name)``. What is true for a while is said once around it: ``with within(stage="drill"): ...`` holds for every
line of whatever is called inside, also by tasks that are started there. The file is ``uvcc_console.runs.logfile``'s;
in a command of the operator, which has none, warnings go to standard error.
"""

from __future__ import annotations

import contextlib
import json
import logging
import traceback
from collections.abc import Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Final

from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.text import complain

CONTEXT: Final = ("run", "pod", "nonce", "stage")
LEVELS: Final = ("info", "warning", "error")
TEXT, TRACE = 4096, 16_384  # characters of a message and of a traceback that are kept
_EMPTY: Final[Mapping[str, str]] = MappingProxyType({})
_around: ContextVar[Mapping[str, str]] = ContextVar("around", default=_EMPTY)


class Log(logging.LoggerAdapter[logging.Logger]):
    """A logger whose methods take ``run``, ``pod``, ``nonce`` and ``stage`` as keywords."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        named = {name: str(kwargs.pop(name)) for name in CONTEXT if name in kwargs}
        kwargs["extra"] = {"context": named}
        return msg, kwargs


def logger(name: str) -> Log:
    """The adapter of one module."""
    return Log(logging.getLogger(name), None)


@contextlib.contextmanager
def within(**context: str) -> Iterator[None]:
    """What every line is about while this lasts, unless it says otherwise itself."""
    token = _around.set({**_around.get(), **context})
    try:
        yield
    finally:
        _around.reset(token)


class WarningsOnStderr(logging.Handler):
    """Warnings for whoever typed a command: cleaned, for they may quote a pod."""

    def emit(self, record: logging.LogRecord) -> None:
        complain(f"uvcc: {self.format(record)}")


def tell_of_warnings() -> None:
    """What goes wrong in a command of the operator is told on standard error. Call once, before it does anything."""
    root = logging.getLogger()
    if not any(isinstance(handler, WarningsOnStderr) for handler in root.handlers):
        root.addHandler(WarningsOnStderr(logging.WARNING))


class JsonLines(logging.Formatter):
    """A record as one line of JSON in ASCII. ``process`` is the name of who writes; bounded, whatever it quotes."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        row: dict[str, Any] = {
            "ts": round(record.created, 3),
            "level": level_of(record.levelno),
            "process": self._process,
            "logger": record.name.removeprefix("uvcc_console."),
            "message": record.getMessage().strip()[:TEXT],
        }
        row |= {**_around.get(), **getattr(record, "context", {})}
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            row["error"] = type(error).__name__
            if isinstance(error, UvccError) and error.hint:
                row["hint"] = error.hint[:TEXT]
            row["trace"] = "".join(traceback.format_exception(error))[-TRACE:]
        return json.dumps(row)


def level_of(number: int) -> str:
    """The one of ``LEVELS`` that a level of the standard library is shown as."""
    if number >= logging.ERROR:
        return "error"
    return "warning" if number >= logging.WARNING else "info"
