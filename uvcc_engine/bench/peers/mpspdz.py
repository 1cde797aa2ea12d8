"""MP-SPDZ where it is installed: a program compiled, and run by three parties of its replicated ring over loopback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.machine.free_ports import ports

MPSPDZ: Final = "UVCC_MPSPDZ"
_PARTY: Final = "replicated-ring-party.x"
_LIMIT_S: Final = 900


def home() -> tuple[Path | None, str]:
    """Its folder; None and why, where there is none."""
    found = Path(os.environ.get(MPSPDZ, "") or "/nowhere")
    if (found / _PARTY).exists():
        return found, ""
    return None, f"absent: {MPSPDZ} names no folder with a built {_PARTY}"


def seconds(folder: Path, name: str, program: str, args: Sequence[str]) -> tuple[float, str]:
    """Seconds of the program's timer 1, as its party 0 tells them; 0 and why, where it tells none."""
    with tempfile.TemporaryDirectory() as made:
        source = Path(made) / f"{name}.mpc"
        source.write_text(program)
        command = [sys.executable, "compile.py", "-R", "64", str(source), *args]
        compiled = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if compiled.returncode:
        return 0.0, f"could not be compiled: {compiled.stderr.strip()[-200:]}"
    found = _timed(folder, "-".join([name, *args]))
    return (0.0, "failed or told no time") if found is None else (found, "")


def _timed(folder: Path, program: str) -> float | None:
    words = [f"./{_PARTY}", "-h", "localhost", "-pn", str(ports(1)[0])]  # its links are sealed, as ours are
    parties = [
        subprocess.Popen(
            [*words, "-p", str(p), program], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for p in range(PARTIES)
    ]
    try:
        said = [party.communicate(timeout=_LIMIT_S)[0] for party in parties]
    except subprocess.TimeoutExpired:
        return None
    finally:
        for party in parties:
            party.kill()
            party.wait()
    told = re.search(r"^Time1 = ([0-9.e+-]+) seconds", said[0], re.MULTILINE)
    return float(told[1]) if told else None
