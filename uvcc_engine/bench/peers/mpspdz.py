"""MP-SPDZ where it is installed: a program compiled, and run by three parties of a replicated ring over loopback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.machine.free_ports import ports

MPSPDZ: Final = "UVCC_MPSPDZ"
_PARTY: Final = "replicated-ring-party.x"
PROVED_PARTY: Final = "sy-rep-ring-party.x"
"""SPDZ-wise sharing: secure with abort against one party that does as it likes. Its tags check a whole scalar product
at once, where the two other such programs (``ps-`` and ``malicious-rep-ring-party.x``) check each multiplication."""
_PROVED_OPTIONS: Final = ("-b", "100000", "-B", "3")  # the sizes of batches with which it took least of the processors
_LIMIT_S: Final = 900


@dataclass(frozen=True, slots=True)
class RunCost:
    """What a whole process took: seconds by its own clock, bytes sent per party, rounds as it counts them."""

    seconds: float
    bytes_per_party: float
    rounds: float

    def more_than(self, other: RunCost, runs: int) -> RunCost:
        """What one of so many runs took that the other process did not make."""
        mine = (self.seconds, self.bytes_per_party, self.rounds)
        theirs = (other.seconds, other.bytes_per_party, other.rounds)
        return RunCost(*((m - t) / runs for m, t in zip(mine, theirs, strict=True)))


def home(party: str = _PARTY) -> tuple[Path | None, str]:
    """Its folder; None and why, where there is none with this program."""
    found = Path(os.environ.get(MPSPDZ, "") or "/nowhere")
    if (found / party).exists():
        return found, ""
    return None, f"absent: {MPSPDZ} names no folder with a built {party}"


def seconds(folder: Path, name: str, program: str, args: Sequence[str]) -> tuple[float, str]:
    """Seconds of the program's timer 1, as its party 0 tells them; 0 and why, where it tells none."""
    if why := _compiled(folder, name, program, args):
        return 0.0, why
    said = _said(folder, _PARTY, (), "-".join([name, *args]))
    told = re.search(r"^Time1 = ([0-9.e+-]+) seconds", said, re.MULTILINE)
    return (float(told[1]), "") if told else (0.0, "failed or told no time")


def proved(folder: Path, name: str, program: str, args: Sequence[str]) -> tuple[RunCost | None, str]:
    """What the whole process of a program takes whose parties check each other; None and why, where it does not say.

    A timer would not do: what is drawn and checked in advance is made before the program's first line.
    """
    if why := _compiled(folder, name, program, args):
        return None, why
    said = _said(folder, PROVED_PARTY, _PROVED_OPTIONS, "-".join([name, *args]))
    shapes = (r"^Time = (\S+) seconds", r"^Global data sent = (\S+) MB", r"^Data sent = \S+ MB in ~(\d+) rounds")
    told = [re.search(shape, said, re.MULTILINE) for shape in shapes]
    try:
        took, sent, rounds = (float(one[1]) for one in told if one is not None)
    except ValueError:
        return None, "failed or told no time"
    return RunCost(took, sent * 1e6 / PARTIES, rounds), ""


def _compiled(folder: Path, name: str, program: str, args: Sequence[str]) -> str:
    """Why a program cannot be compiled; "" where it is."""
    with tempfile.TemporaryDirectory() as made:
        source = Path(made) / f"{name}.mpc"
        source.write_text(program)
        command = [sys.executable, "compile.py", "-R", "64", str(source), *args]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return f"could not be compiled: {done.stderr.strip()[-200:]}" if done.returncode else ""


def _said(folder: Path, party: str, options: Sequence[str], program: str) -> str:
    """What party 0 of three prints; "" where one of them does not come to its end."""
    words = [f"./{party}", "-h", "localhost", "-pn", str(ports(1)[0])]  # its links are sealed, as ours are
    parties = [
        subprocess.Popen(
            [*words, "-p", str(p), *options, program],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for p in range(PARTIES)
    ]
    try:
        printed = [one.communicate(timeout=_LIMIT_S)[0] for one in parties]
        return printed[0]
    except subprocess.TimeoutExpired:
        return ""
    finally:
        for one in parties:
            one.kill()
            one.wait()
