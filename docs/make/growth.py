"""The page of how cost grows: measured powers, from the benchmarks that were kept, and what a billion weights on a
thousand devices need, from a forecast that was kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from docs.make.kept_rows import number
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.simulate import deployment
from uvcc_engine.simulate.deployment import Deployment, Needs, needs
from uvcc_engine.simulate.gpt_forecast import GptForecast, GptSize

DOCS: Final = Path(__file__).parents[1]
MEASURED: Final = "<!-- powers: made by python -m docs.make from docs/benchmarks; do not edit -->"
MEASURED_END: Final = "<!-- /powers -->"
BENCHMARKS: Final = ("scale", "scale-fleets")
BEGIN: Final = "<!-- made by python -m docs.make from docs/forecasts; do not edit -->"
END: Final = "<!-- /made -->"
FORECAST: Final = DOCS / "forecasts" / "gpt-1e9.json"
PLACES: Final = (
    ("one region, 100 Gbit/s", 0.001, 100e9),
    ("neighbouring regions, 10 Gbit/s", 0.005, 10e9),
    ("across an ocean, 10 Gbit/s", 0.04, 10e9),
)


def forecast() -> tuple[GptForecast, Deployment, str]:
    """The kept forecast, where it was to run, and the command that made it."""
    kept: dict[str, Any] = json.loads(FORECAST.read_text(encoding="utf-8"))
    found = kept["found"]
    made = GptForecast(
        GptSize(**kept["size"]), found["rounds"], found["bytes_per_party"], found["checked_against_measured"]
    )
    return made, Deployment(Topology(**kept["topology"])), str(kept["command"])


def _bytes(value: float) -> str:
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:,.0f} B"


def _rows(found: list[Needs]) -> list[tuple[str, list[str]]]:
    def told(name: str) -> list[float]:
        return [float(getattr(one, name)) for one in found]

    return [
        ("delay of all rounds, nothing hidden", [f"{v:,.1f} s" for v in told("delay_s")]),
        ("transfer of a worker's bytes", [f"{v:,.1f} s" for v in told("transfer_s")]),
        ("multiplications of a device", [f"{v:,.2f} s" for v in told("compute_s")]),
        ("**a step, at least**", [f"**{v:,.0f} s**" for v in told("step_s")]),
        ("dollars a step", [f"{v:,.2f}" for v in told("dollars_a_step")]),
        ("transcripts of a day", [_bytes(v) for v in told("transcript_a_day")]),
        ("the console's journal of a day", [_bytes(v) for v in told("journal_a_day")]),
        ("events a second", [f"{v:,.0f}" for v in told("events_a_second")]),
        ("relays, if no link were direct", [f"{v:,.0f}" for v in told("relays")]),
    ]


def made() -> str:
    """The part between the marks."""
    step, place, command = forecast()
    size, grid = step.size, place.size
    found = [needs(step, replace(place, one_way_s=delay, link_bits=bits)) for _, delay, bits in PLACES]
    sizes = f"{size.blocks} blocks, width {size.width:,}, {size.positions:,} places, {size.vocabulary:,} words"
    lines = [
        f"`{command}`",
        "",
        f"A GPT of {size.weights / 1e9:.2f} × 10⁹ weights ({sizes}) on {place.devices} devices, one a worker: "
        f"{grid.replicas} replicas of {size.batch} windows each, {grid.stages} stages, {grid.tensor} tensor ranks in "
        f"each of three domains. A step takes {step.rounds:,} rounds and {_bytes(step.bytes_per_party)} of each party "
        f"and replica, {_bytes(found[0].worker_bytes)} of a worker. The same forecast of a block of GPT-2 small gives "
        f"{step.check:.3f} of the bytes that were measured.",
        "",
        "| | " + " | ".join(name for name, _, _ in PLACES) + " |",
        "|---|" + "---|" * len(PLACES),
    ]
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in _rows(found)]
    lines += [
        "",
        f"Assumed: {place.ring_macs / 1e12:g} × 10¹² multiplications modulo 2^64 a second of a device (an H200's, "
        f"measured), ${place.dollars:g} a device and hour, {deployment.LEAVES_A_ROUND} leaves of "
        f"{deployment.LEAF_B} bytes a worker and round and two more for every MiB, {deployment.JOURNAL_B:g} bytes of "
        f"journal a worker and step, {deployment.RELAY_B / 1e6:g} MB/s of a relay.",
    ]
    return "\n".join(lines)


def _powers(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each cost of each cause."""
    for row in (row for row in rows if row["metric"] == "power"):
        name, cause = row["name"], row["unit"]
        costs = [one for one in rows if one["name"].startswith(f"{name}@")]
        (before, less), (most, value) = ((float(one["name"].rpartition("@")[2]), one["value"]) for one in costs[-2:])
        told = f"{row['value']:.2f} ({row['min']:.2f} to {row['max']:.2f})"
        allowed = f"{row['reference']:g}" + ("" if row["met"] else ", **missed**")
        ends = [f"{number(one['value'])}" for one in (costs[0], costs[-1])]
        cells = [
            cause,
            name.removeprefix(f"{cause}_"),
            *ends,
            f"{number((value - less) / (most - before))} {costs[0]['unit']}",
            told,
            allowed,
        ]
        yield f"| {' | '.join(cells)} | {most:,.0f} |"


def measured() -> str:
    """The powers of the benchmarks that were kept."""
    lines: list[str] = []
    kept_files = (DOCS / "benchmarks" / f"{name}.json" for name in BENCHMARKS)
    for path in (path for path in kept_files if path.is_file()):
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        load = kept["load"]
        lines += [
            f"`{kept['command']}`: {kept['processor']}, commit {kept['commit']}, load {load['before']} before and "
            f"{load['after']} after.",
            "",
            "| cause | cost | at first | at last | one more adds | power (between neighbours) | allowed | up to |",
            "|---|---|---|---|---|---|---|---|",
            *_powers(kept["rows"]),
            "",
        ]
    return "\n".join(lines).rstrip()


def page() -> str:
    """The page as it lies there, with these parts made anew."""
    text = (DOCS / "growth.md").read_text(encoding="utf-8")
    for begin, end, part in ((MEASURED, MEASURED_END, measured()), (BEGIN, END, made())):
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n\n{part}\n\n{end}{after}"
    return text
