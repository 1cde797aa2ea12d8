"""The figures of a report, from a run's own events, as PNG and SVG, each with its numbers as CSV.

Needs matplotlib (extra ``report``), imported only here and only when drawing. A figure without data is not drawn: it is
named with the reason instead.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from uvcc_console.report import collector, grid_figure, metrics
from uvcc_console.report.record import RunRecord
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.machine.extras import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER: Final = "figs"
_COLOURS: Final = {"tp": "#1b9e77", "pp": "#d95f02", "dp": "#7570b3", "F": "#4477aa", "B": "#ee6677", "U": "#bbbbbb"}
_SHOWN: Final = ("epoch root", "dp ready", "dp ok", "fwd open ok", "bwd open ok", "uid wait")
_ROBUST: Final = (
    "worker timeouts",
    "transport aborts",
    "retransmits",
    "duplicates discarded",
    "frames rejected",
    "faults injected",
    "forks",
    "pods lost",
    "workers that failed",
)
_MOST_NUMBERED: Final = 1000  # bars of a schedule that bear the number of their microbatch; more could not be read
FigureRows = Sequence[Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Drawing:
    """One figure: its numbers, and how to draw them. Without rows it is skipped for the reason ``missing``."""

    name: str
    title: str
    columns: Sequence[str]
    rows: FigureRows
    draw: Callable[[Axes, FigureRows], None]
    missing: str = ""
    height: float = 4.2


@dataclass(frozen=True, slots=True)
class Figures:
    """What was written, and which figures were not drawn and why."""

    written: list[Path] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


def write_figures(run_dir: Path, out: Path | None = None, record: RunRecord | None = None) -> Figures:
    """Draw every figure of a run into ``out`` (default ``artifacts/figs``).

    ``record``: the run, if it was read already. Raises UvccError if matplotlib is not installed or nothing can be
    written, UnreadableError without a journal.
    """
    try:
        import matplotlib
    except ImportError as e:
        raise MissingExtraError("matplotlib", "figures need it") from e
    record = record or RunRecord.load(run_dir)
    folder = out or record.artifacts / FOLDER
    done = Figures()
    style = matplotlib.rc_context({"svg.hashsalt": record.snapshot.run, "font.size": 9, "text.parse_math": False})
    with collector.renewing(run_dir) as written, style:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for drawing in drawings(record):
                if not drawing.rows:
                    done.skipped[drawing.name] = drawing.missing
                    continue
                done.written.append(_table(folder / f"{drawing.name}.csv", drawing.columns, drawing.rows))
                done.written.extend(_draw(folder, drawing))
                written[:] = done.written
        except OSError as e:
            raise UvccError(
                f"cannot write into {folder}: {e.strerror}", "free disk space, or name another folder"
            ) from e
    return done


def _table(path: Path, columns: Sequence[str], rows: FigureRows) -> Path:
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(columns)
        out.writerows(rows)
    return path


def _draw(folder: Path, drawing: Drawing) -> list[Path]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, drawing.height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(drawing.title)
    drawing.draw(axes, drawing.rows)
    made = [folder / f"{drawing.name}.png", folder / f"{drawing.name}.svg"]
    figure.savefig(made[0], dpi=150, metadata={"Software": None})
    figure.savefig(made[1], metadata={"Date": None})
    return made


def drawings(record: RunRecord) -> list[Drawing]:
    """Every figure with its numbers, drawn or not: of the last phase, but what went wrong is shown of the whole run."""
    counted = metrics.counts(record)
    last = record.during(record.phases[-1]) if record.phases else record
    happened = metrics.counts(last)
    return [
        _topology(last),
        _init_cdf(last),
        _bars("fig4_event_counts", "Event counts", {k: happened[k] for k in _SHOWN}),
        _bars("fig5_robustness", "Robustness indicators", {k: counted[k] for k in _ROBUST}, keep_zero=True),
        _errors(record),
        *_maps(last),
        _gantt(last),
        _lines(record, "loss", "Training loss, as the workers reported it"),
        _lines(record, "samples_per_s", "Throughput (samples/s per party)"),
        _lines(record, "toks_per_s", "Throughput (tokens/s)"),
    ]


def _topology(record: RunRecord) -> Drawing:
    rows, title = grid_figure.rows(record), "Topology as it ran: stages, tensor ranks within them, replicas"
    why = "no worker was started"
    return Drawing("fig1_topology", title, grid_figure.COLUMNS, rows, grid_figure.draw, why, grid_figure.height(rows))


def _init_cdf(record: RunRecord) -> Drawing:
    rows: list[tuple[str, float, float]] = []
    inits = metrics.group_inits(record)
    for group in metrics.GROUPS:
        seconds = sorted(i.seconds for i in inits if i.group == group)
        rows += [(group, s, (i + 1) / len(seconds)) for i, s in enumerate(seconds)]

    def draw(axes: Axes, rows: FigureRows) -> None:
        for group in metrics.GROUPS:
            line = [(s, share) for g, s, share in rows if g == group]
            if line:
                axes.step(*zip(*line, strict=True), where="post", label=group.upper(), color=_COLOURS[group])
        axes.set_xlabel("initialisation, seconds")
        axes.set_ylabel("share of workers")
        axes.set_ylim(0, 1.02)
        axes.legend()

    why = "no worker reported how long its groups took (group_ready)"
    return Drawing("fig3_init_cdf", "Group initialisation time (CDF)", ("group", "seconds", "share"), rows, draw, why)


def _bars(name: str, title: str, counted: Mapping[str, int], *, keep_zero: bool = False) -> Drawing:
    rows = [(k, v) for k, v in counted.items() if v or keep_zero]

    def draw(axes: Axes, rows: FigureRows) -> None:
        bars = axes.barh([str(r[0]) for r in rows], [float(r[1]) for r in rows], color=_COLOURS["F"])
        axes.bar_label(bars, padding=3, fmt="%d")
        axes.margins(x=0.12)
        axes.set_xlim(0, 1.15 * max(1.0, *(float(r[1]) for r in rows)))
        axes.invert_yaxis()
        axes.set_xlabel("count")

    return Drawing(name, title, ("metric", "count"), rows, draw, "none of these events happened")


def _errors(record: RunRecord) -> Drawing:
    found = metrics.errors_by_group(record)
    groups = (*metrics.GROUPS, "plane")
    types = (metrics.TIMEOUT, metrics.ABORT, metrics.RETRANSMIT, metrics.REJECTED)
    rows = [(g, t, found.get((g, t), 0)) for g in groups for t in types]

    def draw(axes: Axes, rows: FigureRows) -> None:
        base = [0.0] * len(groups)
        for t in types:
            heights = [float(next(n for g, u, n in rows if (g, u) == (group, t))) for group in groups]
            axes.bar([g.upper() for g in groups], heights, bottom=base, label=t)
            base = [b + h for b, h in zip(base, heights, strict=True)]
        axes.set_ylabel("count")
        axes.set_ylim(0, max([*base, 1.0]) * 1.1)
        for place, total in enumerate(base):
            axes.text(place, total, f"{total:.0f}", ha="center", va="bottom")
        axes.legend()

    return Drawing("fig6_errors_by_group", "Errors by group and type", ("group", "type", "count"), rows, draw)


def _maps(record: RunRecord) -> list[Drawing]:
    cells = metrics.dp_map(record)
    ready = [(s, t, n, expected) for (s, t), (n, expected, _) in cells.items()]
    latency = [(s, t, p50) for (s, t), (_, _, p50) in cells.items() if p50 is not None]

    def draw_ready(axes: Axes, rows: FigureRows) -> None:
        _heat(axes, [(s, t, n / e, f"{n}/{e}") for s, t, n, e in rows], "share ready", 1.0)

    def draw_latency(axes: Axes, rows: FigureRows) -> None:
        _heat(axes, [(s, t, p, f"{p:.2f} s") for s, t, p in rows], "p50, seconds", max(r[2] for r in rows) or 1.0)

    why = "no worker reported a data-parallel group (dp_ready, group_ready)"
    some = any(n for _, _, n, _ in ready)
    return [
        Drawing(
            "fig7_dp_ready",
            "Data-parallel readiness per stage and tensor rank",
            ("stage", "tensor", "ready", "expected"),
            ready if some else (),
            draw_ready,
            why,
        ),
        Drawing(
            "fig8_dp_init_p50",
            "Data-parallel initialisation p50 per stage and tensor rank",
            ("stage", "tensor", "p50_s"),
            latency,
            draw_latency,
            why,
        ),
    ]


def _heat(axes: Axes, cells: Sequence[tuple[int, int, float, str]], label: str, top: float) -> None:
    stages, ranks = 1 + max(c[0] for c in cells), 1 + max(c[1] for c in cells)
    grid = [[float("nan")] * ranks for _ in range(stages)]
    for stage, rank, value, _ in cells:
        grid[stage][rank] = value
    image = axes.imshow(grid, vmin=0.0, vmax=top, cmap="viridis", aspect="auto")
    for stage, rank, value, text in cells:
        axes.text(rank, stage, text, ha="center", va="center", color="white" if value < 0.6 * top else "black")
    axes.set_xticks(range(ranks))
    axes.set_yticks(range(stages))
    axes.set_xlabel("tensor rank t")
    axes.set_ylabel("stage s")
    axes.figure.colorbar(image, ax=axes, label=label)


def _gantt(record: RunRecord) -> Drawing:
    ticks = metrics.schedule(record)
    rows = [(t.coord, t.step, t.phase, t.microbatch, t.start, t.end) for t in ticks]

    def draw(axes: Axes, rows: FigureRows) -> None:
        from matplotlib.collections import PolyCollection

        by_lane: dict[str, list[Sequence[Any]]] = {}
        for row in rows:
            by_lane.setdefault(row[0], []).append(row[2:])
        lanes, boxes, colours = sorted(by_lane), list[list[tuple[float, float]]](), list[str]()
        for lane, coord in enumerate(lanes):
            bars = by_lane[coord]
            places, deep = side_by_side([(start, end) for _, _, start, end in bars])
            height = 0.8 / deep
            for (phase, microbatch, start, end), place in zip(bars, places, strict=True):
                low = lane - 0.4 + height * place
                boxes.append([(start, low), (end, low), (end, low + height), (start, low + height)])
                colours.append(_COLOURS.get(phase, "#999999"))
                if len(rows) <= _MOST_NUMBERED:
                    middle, size = low + height / 2, max(3, 6 - deep / 2)
                    axes.text((start + end) / 2, middle, str(microbatch), ha="center", va="center", fontsize=size)
        axes.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors="white", linewidths=0.4))
        axes.autoscale_view()
        axes.set_yticks(range(len(lanes)), lanes)
        axes.invert_yaxis()
        axes.set_xlabel("seconds in the step (blue forward, red backward, grey update)")

    step = ticks[0].step if ticks else 0
    why = "no worker reported its schedule (pipeline_tick)"
    columns = ("coord", "step", "phase", "microbatch", "start_s", "end_s")
    height = max(4.2, 0.24 * len({r[0] for r in rows}))
    return Drawing("fig9_schedule", f"Pipeline schedule as it ran, step {step}", columns, rows, draw, why, height)


def side_by_side(spans: Sequence[tuple[float, float]]) -> tuple[list[int], int]:
    """A place for each span, in order of its start, so that no two at one place overlap; and how many places there are.

    A worker has several microbatches on their way at a time: it computes one while another waits for its messages.
    """
    ends: list[float] = []
    places = []
    for start, end in spans:
        place = next((i for i, before in enumerate(ends) if before <= start), len(ends))
        ends[place : place + 1] = [end]
        places.append(place)
    return places, max(1, len(ends))


def _lines(record: RunRecord, name: str, title: str) -> Drawing:
    by_worker = metrics.series(record).get(name, {})
    rows = [(coord, int(x), y) for coord, line in sorted(by_worker.items()) for x, y in line]
    if not any(r[2] for r in rows):
        rows = []

    def draw(axes: Axes, rows: FigureRows) -> None:
        for coord in sorted({r[0] for r in rows}):
            line = [(x, y) for c, x, y in rows if c == coord]
            axes.plot(*zip(*line, strict=True), label=coord, lw=1.2, marker="." if len(line) < 30 else "")
        axes.set_xlabel("step")
        axes.set_ylabel(name)
        if len({r[0] for r in rows}) <= 12:
            axes.legend(fontsize=7)

    return Drawing(name, title, ("coord", "step", name), rows, draw, f"no worker reported {name}")
