"""The saved rows of benchmarks (``docs/benchmarks/*.json``) as tables of the page that tells how fast it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from docs.make.kept_rows import DOCS, filled, kept, number
from docs.make.words import HEAD

_TABLES: Final = "{{tables}}"
_RATIOS: Final = "{{proof ratios}}"
_PROVED: Final = {
    "matmul 256³": "matmul_256_verified",
    "matmul 1024³": "matmul_1024_verified",
    "MLP step, products": "mlp_step_products_verified",
    "MLP step, everything": "mlp_step_verified",
    "10⁶ ReLUs": "relu_1e6_verified",
}
_OF_A_PROOF: Final = {"seconds": "seconds", "bytes_per_party": "bytes a party", "peak_memory": "peak memory"}
_MACHINE: Final = ("machine_", "ring_gemm_1", "ring_gemm_5")  # what bounds the other rows; a GPU's is shown
_OF_GROWTH: Final = ("cost", "each")  # which the page of growth shows side by side


def _cells(row: dict[str, Any]) -> Iterator[str]:
    yield f"`{row['name']}`"
    yield str(row["metric"]).replace("_", " ")
    spread = "" if row["runs"] == 1 else f" ({number(row['min'])} to {number(row['max'])})"
    yield f"{number(row['value'])} {row['unit']}{spread}"
    yield "" if row["reference"] is None else number(row["reference"])
    bar = row["bar"]
    yield "" if bar is None else f"{number(bar)}{'' if row['met'] else ', missed'}"


def tables() -> str:
    """Every saved file as a section."""
    lines: list[str] = []
    for path in sorted((DOCS / "benchmarks").glob("*.json")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        load = kept["load"]
        busy = f"load {load['before']} before and {load['after']} after" if load else "its load was not read"
        lines += [
            f"### {path.stem}",
            "",
            f"`{kept['command']}`",
            "",
            f"{kept['processor']}, commit {kept['commit']}, {busy}.",
            "",
            "| row | metric | median (range) | held against | bar here |",
            "|---|---|---|---|---|",
        ]
        rows = [row for row in kept["rows"] if not row["name"].startswith(_MACHINE)]
        rows = [row for row in rows if row["metric"] not in _OF_GROWTH]
        lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def proof_ratios() -> str:
    """What a proof multiplies, row by row of ``mpc-proved``, with the rounds that it takes."""
    rows = {metric: [kept(f"mpc-proved {name} {metric}") for name in _PROVED.values()] for metric in _OF_A_PROOF}
    rounds = [kept(f"mpc-proved {name} proof_rounds") for name in _PROVED.values()]
    lines = [f"| ratio to the unproved row, and its bar | {' | '.join(_PROVED)} |", f"|---|{'---|' * len(_PROVED)}"]
    for metric, about in _OF_A_PROOF.items():
        ratios = [(row["value"] / row["reference"], row["bar"] / row["reference"]) for row in rows[metric]]
        lines.append(f"| {about} | {' | '.join(f'{number(found)} ({number(bar)})' for found, bar in ratios)} |")
    counted = (f"{number(row['value'])} ({number(row['bar'])})" for row in rounds)
    return "\n".join([*lines, f"| rounds of the proof | {' | '.join(counted)} |"])


def page() -> str:
    """The page: its text (``benchmarks.txt``) with tables and figures from the kept rows."""
    text = (Path(__file__).parent / "benchmarks.txt").read_text(encoding="utf-8")
    before, _, after = text.partition(_TABLES)
    after, _, rest = after.partition(_RATIOS)
    title, _, about = before.partition("\n")
    return f"{title}\n\n{HEAD}\n{filled(about)}{tables()}{filled(after)}{proof_ratios()}{filled(rest)}"
