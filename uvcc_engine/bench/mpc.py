"""``bench mpc``: secret-shared arithmetic and training steps, three processes over sealed direct links on this host.

First the machine's own rates are measured: rows ``machine_*`` and ``ring_gemm_*``. Every row of seconds then stands
beside the floor that they imply, and its bar is a multiple of that floor, so that it says the same on every machine.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from uvcc_engine.bench.launch.parties import said_by
from uvcc_engine.bench.peers import mpc_peers
from uvcc_engine.bench.timing import gpu_rates, machine_rates
from uvcc_engine.bench.work import mpc_links, mpc_proofs, mpc_split
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.machine.benchrows import Row, held, row, to_json, to_text
from uvcc_engine.contract.machine.by_itself import exit_code
from uvcc_engine.contract.machine.free_ports import ports
from uvcc_engine.contract.machine.raising_parser import RaisingParser, natural
from uvcc_engine.contract.parsing.suggest import CLOSE, did_you_mean
from uvcc_engine.mpc.kernels.choose import device_for
from uvcc_engine.transcript.signing.identity import Identity

# most times the machine's floor, most bytes per party, most rounds
BARS: Final[dict[str, tuple[float, float, float]]] = {
    "matmul_1024": (4.0, 12.0e6, 2),
    "matmul_256": (8.0, 0.75e6, 2),
    "matmul_512": (4.0, 3.0e6, 2),
    "mul_1e6": (6.0, 11.5e6, 2),
    "drelu_1e6": (8.0, 14.5e6, 5),
    "relu_1e6": (8.0, 25.1e6, 6),
    "relu_1e6_k32": (8.0, 18.0e6, 5),
    "mlp_step": (16.0, 4.4e6, 30),
    "mlp_step_5ms": (2.5, 8.7e6, 20),
    "mlp_step_20ms": (1.4, 8.7e6, 20),
    "mlp_step_50ms": (1.3, 8.7e6, 20),
    "mlp_step_20ms_100mbit": (1.5, 8.7e6, 20),
    "mlp_step_20ms_1gbit": (1.5, 8.7e6, 20),
    "mlp_step_20ms_10gbit": (1.5, 8.7e6, 20),
}
# the same on a GPU that the three parties share; the floor counts its 8-bit units and the sealing on processors
GPU_BARS: Final[dict[str, tuple[float, float, float]]] = {
    "matmul_1024": (6.0, 12.0e6, 2),
    "matmul_4096": (5.0, 191e6, 2),
    "relu_1e6": (8.0, 25.1e6, 6),
    "relu_1e7": (6.0, 251e6, 6),
    "mlp_step": (40.0, 4.4e6, 30),
    "mlp_step_20ms": (1.5, 8.7e6, 20),
    "gpt_tiny_step": (150.0, 3.4e6, 180),
    "gpt_step": (6.0, 890e6, 650),
}
ROWS: Final = tuple(BARS)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_parties(rows: Sequence[str], runs: int, *, split: bool = False, device: str = "cpu") -> list[dict[str, Any]]:
    """Start three party processes and return what each measured."""
    with tempfile.TemporaryDirectory() as folder:
        for p in range(3):
            Identity.create(Path(folder) / f"id{p}")
        config = {"folder": folder, "addresses": _addresses(), "rows": list(rows), "runs": runs}
        config |= {"split": split, "device": device}
        return said_by("mpc_party", config)


def _addresses() -> dict[str, str]:
    """Three free ports of the loopback interface."""
    return {str(p): f"127.0.0.1:{port}" for p, port in enumerate(ports(3))}


def table(
    measured: list[dict[str, Any]],
    machine: Mapping[str, list[float]],
    cores: int,
    gpu_macs: float = 0.0,
) -> list[Row]:
    """Rows in the shape of every benchmark. A run took as long as its slowest party.

    The reference of seconds is the floor that the machine's own rates imply for the three parties on their cores:
    multiplications of matrix products at the double-precision rate, every byte sent enciphered, deciphered and copied
    twice; and what the link takes: the delay of the rounds, and the bytes at its rate. ``gpu_macs``: multiplications
    modulo 2^64 a second of the GPU that all three compute on, if they do.
    """
    out: list[Row] = []
    bars = GPU_BARS if gpu_macs else BARS
    for name in (n for n in measured[0] if n in bars):
        parts = [party[name] for party in measured]
        seconds = [max(run) for run in zip(*(p["seconds"] for p in parts), strict=True)]
        sent = sum(p["bytes"] for p in parts)
        work = sent * 2 * (1 / statistics.median(machine["aes"]) + 1 / statistics.median(machine["copy"]))
        work += 0.0 if gpu_macs else parts[0]["products"] / statistics.median(machine["fp64_1024"])
        rounds = parts[0]["rounds"]
        floor = work / min(cores, PARTIES) + mpc_links.passive_floor_s(name, rounds, sent / PARTIES)
        floor += parts[0]["products"] / gpu_macs if gpu_macs else 0.0
        most, most_bytes, most_rounds = bars[name]
        out.append(held(row(name, "seconds", "s", seconds, floor), most * floor))
        out.append(held(row(name, "bytes_per_party", "B", [sent / PARTIES]), most_bytes))
        out.append(held(row(name, "rounds", "rounds", [float(rounds)]), most_rounds))
    return out


def gpu_rates_of(device: str, runs: int) -> tuple[float, list[Row]]:
    """Multiplications modulo 2^64 a second that the GPU's 8-bit units allow (0 without one), and the rows about it."""
    if device != "cuda":
        return 0.0, []
    print(gpu_rates.described(), file=sys.stderr)
    rates = gpu_rates.measured(runs)
    return statistics.median(rates["int8"]) / gpu_rates.DIGIT_PRODUCTS, gpu_rates.rows(rates)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    made = RaisingParser(prog="uvcc-engine bench mpc", description=__doc__)
    made.add_argument("--rows", default="", help="comma-separated row names")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: all parties on this one GPU")
    made.add_argument("--runs", type=natural, default=5)
    made.add_argument("--json", action="store_true")
    made.add_argument(
        "--against",
        default="",
        metavar="PEERS",
        help=f"other systems, of {', '.join(mpc_peers.PEERS)}; with --verify, beside proved rows as well",
    )
    made.add_argument("--verify", action="store_true", help="the rows whose products can be proved, without and with")
    made.add_argument("--split", action="store_true", help="what of each row depends on no data, and what is left")
    args = made.parse_args(argv)
    known = tuple(GPU_BARS) if args.device == "cuda" else ROWS
    names = args.rows.split(",") if args.rows else list(known)
    unknown = sorted(set(names) - set(known))
    if unknown:
        hint = did_you_mean(unknown[0], known, f"one of: {', '.join(known)}", CLOSE)
        raise ConfigError(f"unknown row {unknown[0]!r}", hint)
    if args.device == "cuda" and (args.verify or args.against):
        raise ConfigError("proofs and other systems compute on processors", "leave --device out beside them")
    device_for(args.device)
    if args.verify:
        names = mpc_proofs.rows_of(names)
    peers = mpc_peers.chosen(args.against)
    cores = available_cores()
    print(machine_rates.described(cores), file=sys.stderr)
    rates = machine_rates.measured(args.runs)
    gpu, shown = gpu_rates_of(args.device, args.runs)
    measured = run_parties(names, args.runs, split=args.split, device=args.device)
    ours = table(measured, rates, cores, gpu)
    proved = mpc_proofs.table(measured)
    rows = machine_rates.rows(rates) + shown + ours + proved + mpc_split.table(measured, names)
    for peer in peers:
        rows += mpc_peers.beside(peer, names, args.runs, ours, proved)
    print(to_json(rows) if args.json else to_text(rows))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
