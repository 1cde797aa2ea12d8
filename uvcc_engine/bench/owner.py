"""``bench owner``: how fast a data owner splits and seals, and how much memory a long file takes on the way.

``owner_seal`` counts megabytes of doubles per CPU second: encoding, splitting, committing, sealing and hashing, to
files. ``owner_share`` is the whole program over a CSV file with a schema, which it reads twice; ``owner_share_npz`` is
the same over arrays of doubles in an ``.npz`` file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.lib import format as npy

from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job import owner_files
from uvcc_engine.contract.machine.benchrows import Row, held, row, to_json, to_text
from uvcc_engine.contract.machine.raising_parser import RaisingParser, natural
from uvcc_engine.data.csv_table import CsvTable
from uvcc_engine.data.features import sides
from uvcc_engine.data.schema import load_schema
from uvcc_engine.data.sets import TEST
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.sealing.components import Ring
from uvcc_engine.sealing.inputs import encode_fixed
from uvcc_engine.sealing.purpose import Purpose
from uvcc_engine.sealing.streamed_inputs import share_rows
from uvcc_engine.transcript.signing.identity import Identity

COLUMNS: Final = 48
_MIB: Final = 1 << 20
_BLOCK_ROWS: Final = 4096
_PROGRAM: Final = """
import resource, sys
from uvcc_engine.cli import main
if code := main(sys.argv[1:]): sys.exit(code)
used = resource.getrusage(resource.RUSAGE_SELF)
try: peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
except OSError: peak = used.ru_maxrss  # which on Linux counts the process that started this one, too
print(used.ru_utime + used.ru_stime, peak, file=sys.stderr)
"""
_PODS: Final = [[Identity(bytes([p + 1]) * 32, bytes([p + 9]) * 32).public for p in range(3)]]
_OWNER: Final = Identity(b"o" * 32, b"w" * 32)


def sealing_rate(mib: int, folder: Path) -> float:
    """Megabytes of doubles per CPU second."""
    rows = mib * _MIB // (8 * COLUMNS)
    some = np.random.default_rng(7).normal(size=(_BLOCK_ROWS, COLUMNS))
    shapes = {"train_x": (rows, COLUMNS)}
    purpose = Purpose(job="00" * 32, steps=1, owners=(_OWNER.public.x25519,))

    def blocks() -> Iterator[tuple[str, Ring]]:
        for start in range(0, rows, _BLOCK_ROWS):
            yield "train_x", encode_fixed("features", some[: min(_BLOCK_ROWS, rows - start)], 16)

    began = time.process_time()
    share_rows(shapes, blocks(), 16, _PODS, _OWNER, purpose, [folder / f"sealed-p{p}" for p in range(3)])
    return rows * COLUMNS * 8 / 1e6 / (time.process_time() - began)


def write_csv(path: Path, mib: int) -> int:
    """A table of ``COLUMNS`` numbers and a class; returns how many rows it has."""
    random, rows = np.random.default_rng(3), 0
    with path.open("w") as file:
        file.write(",".join([*(f"c{n}" for n in range(COLUMNS)), "target"]) + "\n")
        while file.tell() < mib * _MIB:
            values = random.normal(size=(_BLOCK_ROWS, COLUMNS))
            lines = [",".join([*(f"{v:.6f}" for v in line), str(int(line[0] > 0))]) for line in values.tolist()]
            file.write("\n".join(lines) + "\n")
            rows += _BLOCK_ROWS
    return rows


def write_npz(path: Path, mib: int) -> int:
    """Features ``(rows, COLUMNS)`` and labels ``(rows,)``, written block by block; returns how many rows they have."""
    random, blocks = np.random.default_rng(3), max(1, mib * _MIB // (8 * COLUMNS * _BLOCK_ROWS))
    rows = blocks * _BLOCK_ROWS
    with zipfile.ZipFile(path, "w") as archive:
        for name, dtype, shape in (("x", "<f8", (rows, COLUMNS)), ("y", "<i8", (rows,))):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                npy.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
                for _ in range(blocks):
                    block = random.normal(size=(_BLOCK_ROWS, *shape[1:]))
                    file.write((block if name == "x" else block > 0).astype(dtype).tobytes())
    return rows


def whole_program(mib: int, folder: Path) -> tuple[float, int]:
    """(CPU seconds per 10^9 bytes of CSV, greatest resident bytes) of ``uvcc-engine seal``. Raises UvccError."""
    rows = write_csv(folder / "rows.csv", mib)
    columns = "\n".join(f"  c{n}: {{kind: standardise}}" for n in range(COLUMNS))
    (folder / "schema.yaml").write_text(f"target: {{column: target, values: ['0', '1']}}\ncolumns:\n{columns}\n")
    tested = sides(CsvTable("rows.csv", {}, tuple(range(rows)), ""), load_schema(folder / "schema.yaml")) == TEST
    model = model_to_json(model_of_list([{"linear": 8}, "relu", "linear"], COLUMNS, 2))
    _request(folder, {"model": model, "steps": 1, "test_rows": int(tested.sum())})
    seconds, peak = _sealed(folder, ["--data", folder / "rows.csv", "--schema", folder / "schema.yaml"])
    return seconds * 1e9 / (folder / "rows.csv").stat().st_size, peak


def whole_program_npz(mib: int, folder: Path) -> tuple[float, int]:
    """(10^6 bytes of doubles per CPU second, greatest resident bytes) of ``uvcc-engine seal``. Raises UvccError."""
    rows = write_npz(folder / "rows.npz", mib)
    model = model_to_json(model_of_list([{"linear": 8}, "relu", "linear"], COLUMNS, 2))
    _request(folder, {"model": model, "steps": 1, "test_rows": rows // 10})
    seconds, peak = _sealed(folder, ["--data", folder / "rows.npz"])
    return rows * COLUMNS * 8 / 1e6 / seconds, peak


def _sealed(folder: Path, data: Sequence[str | Path]) -> tuple[float, int]:
    """(CPU seconds, greatest resident bytes) of the program over these files."""
    files = ["--owner", folder / "owner", *data]
    command = ["seal", "--request", folder / owner_files.REQUEST, *files, "--out", folder / "out"]
    program = [sys.executable, "-c", _PROGRAM, *map(str, command)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UvccError(f"uvcc-engine seal failed: {done.stderr.strip()[-200:]}")
    seconds, kib = done.stderr.split()
    return float(seconds), int(kib) * 1024


def _request(folder: Path, job: dict[str, Any]) -> None:
    if not (folder / "owner").exists():
        Identity.create(folder / "owner")
    owner = Identity.load(folder / "owner").public.x25519
    pods = [[one.to_json() for one in pods] for pods in _PODS]
    told = {"proposal": "ab" * 32, "attempt": 0, "job": job, "reveal": [], "owners": [owner], "pods": pods}
    (folder / owner_files.REQUEST).write_text(json.dumps(told))


def measure(mib: int, runs: int) -> list[Row]:
    """All rows of this benchmark."""
    with tempfile.TemporaryDirectory(prefix="uvcc-bench-") as name:
        folder = Path(name)
        rate = row("owner_seal", "rate", "MB/s", [sealing_rate(min(mib, 256), folder) for _ in range(runs)])
        seconds, peak = whole_program(mib, folder)
        (folder / "rows.csv").unlink()
        npz_rate, npz_peak = whole_program_npz(mib, folder)
    return [
        held(rate, 100.0, at_least=True),
        row("owner_share", "seconds", "s/GB", [seconds]),
        held(row("owner_share", "bytes", "MiB", [peak / _MIB]), 300.0),
        row("owner_share_npz", "rate", "MB/s", [npz_rate]),
        held(row("owner_share_npz", "bytes", "MiB", [npz_peak / _MIB]), 300.0),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = RaisingParser(prog="uvcc-engine bench owner", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--mib", type=int, default=1024, help="size of each data file (1024)")
    parser.add_argument("--runs", type=natural, default=3, help="of the sealing alone (3)")
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    args = parser.parse_args(argv)
    rows = measure(args.mib, args.runs)
    print(to_json(rows) if args.json else to_text(rows))
    return 0 if all(one.met is not False for one in rows) else 1
