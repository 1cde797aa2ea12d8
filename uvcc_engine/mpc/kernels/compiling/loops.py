"""Where the compiled loops come from: compiled once per installation, beside the work that could already use them.

Compiling takes seconds, once; the machine code is kept beside ``jit``'s source, or in UVCC_LOOPS (pods on the
operator's own machine get the installation's folder there), or in NUMBA_CACHE_DIR. A process that asked for
``compile_beside`` does not wait: it starts one process that compiles everything, and works with torch until a mark in
that folder says that the cache is complete. Both give the same numbers. Without it, or where the folder cannot be
written, whoever first needs a loop compiles it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Final

from uvcc_engine.contract.machine.compiled import LOOPS_ENV, is_guarded, loops_folder
from uvcc_engine.contract.machine.compiler_units import compiled_for

log = logging.getLogger(__name__)
_MODULE: Final = "uvcc_engine.mpc.kernels.jit"
_KERNELS: Final = Path(__file__).parents[1]
_SHARED: Final = _KERNELS.parents[1] / "contract" / "machine" / "numba_cache.py"
LOOK_S: Final = 0.25  # between two looks for the mark


@cache
def _mark_name() -> str:
    files = [_KERNELS / "jit.py", _KERNELS / "compiling" / "loop_cache.py"]
    files += [path for of in (".", "gemm", "proving") for path in sorted((_KERNELS / of).glob("*_loops.py"))]
    files += [_KERNELS / "proving" / "word_vectors.py", _SHARED]
    source = b"".join(path.read_bytes() for path in files)
    return f"loops-{hashlib.sha256((sys.version + compiled_for()).encode() + source).hexdigest()[:16]}.done"


def mark() -> Path:
    """The file that says that all loops of this source are compiled, by this Python, for the processor that numba has
    been told of."""
    return loops_folder() / _mark_name()


def code_folder() -> Path:
    """Where numba keeps the machine code of this source: other sources' lies beside it."""
    return mark().with_suffix("")


def take_over() -> None:
    """Begin with what UVCC_LOOPS holds for this source where it can only be read.

    So a domain's own user compiles nothing that the administrator's installation has compiled. Raises OSError if the
    copy cannot be kept.
    """
    theirs, mine = Path(os.environ.get(LOOPS_ENV) or loops_folder()), loops_folder()
    done = theirs / mark().name
    if theirs != mine and done.exists() and is_guarded(theirs):
        shutil.copytree(done.with_suffix(""), code_folder(), copy_function=shutil.copyfile, dirs_exist_ok=True)


class Loops:
    """The compiled loops of one process: there, on their way, or not to be had."""

    def __init__(self) -> None:
        self._found: ModuleType | None = None
        self._missing = importlib.util.find_spec("numba") is None
        self._beside = False
        self._maker: subprocess.Popen[bytes] | None = None
        self._next_look = 0.0

    def compile_beside(self) -> None:
        """From now on, never wait for the compiler."""
        self._beside = True

    @property
    def found(self) -> ModuleType | None:
        """The module of the loops if somebody has asked for it before; never loads anything."""
        return self._found

    def get(self) -> ModuleType | None:
        """The module of the loops, or None: not installed, or not compiled yet."""
        if self._found is None and not self._missing:
            self._found = self._look()
        return self._found

    def _look(self) -> ModuleType | None:
        if self._beside and not self._compiled():
            return None
        try:
            return importlib.import_module(_MODULE)
        except ImportError:
            self._missing = True
            return None

    def _compiled(self) -> bool:
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_S
        if mark().exists():
            self._maker = None
            return True
        if self._maker is None:
            command = [sys.executable, "-m", "uvcc_engine.mpc.kernels.compiling.compile"]
            self._maker = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        elif self._maker.poll():
            log.warning("the loops could not be compiled beside the work (%s): compiling now", self._maker.returncode)
            return True
        return False


LOOPS = Loops()
