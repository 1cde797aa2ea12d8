"""Compiles all loops of an installation, and of the checkout that its tests lie in where that is another copy.

pytest's workers import the installation; processes that begin in the checkout's folder import the checkout.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import uvcc_engine
from uvcc_engine.contract.machine.compiled import kept_in, loops_folder
from uvcc_engine.mpc.kernels.compiling.compile import main as compile_loops
from uvcc_engine.mpc.kernels.compiling.loops import mark

TESTS = Path(__file__).resolve().parent
ATTENTION = TESTS / "engine" / "nsa" / "compile_attention.py"


def hand_on(kept: Path, to: Path, done: str) -> None:
    """Copy machine code and measured rates; the mark that says that they are complete comes last."""
    to.mkdir(parents=True, exist_ok=True)
    for name in (Path(done).stem, "attention-*", "gemm-*.json"):
        for path in kept.glob(name):
            if path.is_dir():
                shutil.copytree(path, to / path.name, dirs_exist_ok=True)
            else:
                shutil.copy(path, to)
    if (kept / done).exists():
        (to / done).touch()


def main() -> None:
    attention = subprocess.Popen([sys.executable, str(ATTENTION)])
    compile_loops()
    attention.wait()
    package, checkout = Path(uvcc_engine.__file__).parent, TESTS.parent / "uvcc_engine"
    if loops_folder() == kept_in(package) and not checkout.samefile(package):
        hand_on(kept_in(package), kept_in(checkout), mark().name)


if __name__ == "__main__":
    main()
