"""The fleet's columns: what each shows, what it is sorted by, and which are shown for which kind of run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from uvcc_console.core.series import Series
from uvcc_console.ui.drawing.format import age, number, short
from uvcc_console.ui.drawing.paint import Span, clean
from uvcc_console.ui.drawing.spark import spark
from uvcc_console.ui.judging.view import WAITS, FleetRow, View, party_role
from uvcc_console.ui.widgets.heat import floor_of
from uvcc_console.ui.widgets.table import Column
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing.suggest import nearest
from uvcc_engine.contract.run_files.waiting import Waiting

CURSOR: Final = Column("cursor", "", 2)
TREND: Final = 10
_PARTIES: Final = tuple(f"p{p}" for p in range(PARTIES))
Sortable = float | str | None


@dataclass(frozen=True, slots=True)
class FleetColumn:
    """``value`` is what the column is sorted by, None last; ``cell`` what it shows; ``falls``: largest first."""

    column: Column
    value: Callable[[FleetRow], Sortable]
    cell: Callable[[View, FleetRow, str], Span]
    falls: bool = False

    @property
    def key(self) -> str:
        return self.column.key


def _beat(name: str) -> Callable[[FleetRow], Sortable]:
    def value(row: FleetRow) -> Sortable:
        found = row.beat.get(name)
        return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else None

    return value


def _vital(name: str) -> Callable[[FleetRow], Sortable]:
    return lambda row: row.vitals.get(name)


def rate_of(row: FleetRow) -> Sortable:
    """Samples or tokens a second; a rate of zero is none."""
    found = row.beat.get("samples_per_s", row.beat.get("toks_per_s"))
    return float(found) if isinstance(found, (int, float)) and found else None


def _number(value: Callable[[FleetRow], Sortable], digits: int = 4) -> Callable[[View, FleetRow, str], Span]:
    def cell(view: View, row: FleetRow, stale: str) -> Span:
        found = value(row)
        return (number(found, digits), stale or "text") if isinstance(found, float) else ("", "")

    return cell


def _limits(value: Callable[[FleetRow], Sortable], warn: float, bad: float, unit: str) -> Callable[..., Span]:
    """A whole number that is amber from ``warn`` on and red from ``bad`` on."""

    def cell(view: View, row: FleetRow, stale: str) -> Span:
        found = value(row)
        if not isinstance(found, float):
            return "", ""
        return f"{found:.0f}{unit}", stale or ("bad" if found >= bad else "warn" if found >= warn else "text")

    return cell


def _step(view: View, row: FleetRow, stale: str) -> Span:
    return str(row.step) if row.step >= 0 else view.glyphs.dot, stale or ("text" if row.step >= 0 else "faint")


def _heard(view: View, row: FleetRow, stale: str) -> Span:
    return (view.glyphs.dot, "faint") if row.age is None else (f"{row.health.glyph} {age(row.age)}", row.health.role)


def _root(view: View, row: FleetRow, stale: str) -> Span:
    dot = view.glyphs.dot
    return f"{short(row.root)} {dot} {row.epoch}" if row.root else dot, stale or ("text" if row.root else "faint")


def _paths(view: View, row: FleetRow, stale: str) -> Span:
    known = view.snap.pods.get(row.pod)
    if known is None or not known.paths:
        return "", "muted"
    down = [name for name, (up, _) in known.paths.items() if not up]
    return (
        (f"{view.glyphs.fail}{','.join(down)}", "bad") if down else (f"{view.glyphs.ok} {len(known.paths)} up", "muted")
    )


def _state(view: View, row: FleetRow, stale: str) -> Span:
    """The state in as few words as tell it: of a wait whom it is for, since the column has no room for how long."""
    word = row.health.word.replace("stopped because of", "due to")
    if word.startswith(WAITS) and (waiting := Waiting.of(row.beat)) is not None:
        whom = clean(waiting.whom)
        word = f"waits {whom.upper() if whom in _PARTIES else whom}"
    return f"{row.health.glyph} {word}", row.health.role


class _Same:
    """Measurements that are the same object, for a cache: a fleet asks once a frame, not once a row."""

    def __init__(self, series: Mapping[str, Mapping[str, Series]]) -> None:
        self.series = series

    def __hash__(self) -> int:
        return id(self.series)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.series is other.series


@lru_cache(maxsize=2)
def _scale_of(same: _Same) -> tuple[float, float]:
    """From where to where the step times of a fleet are drawn."""
    recent = [line.recent(TREND) for by_name in same.series.values() if (line := by_name.get("step_s")) and len(line)]
    return floor_of([times[-1] for times in recent]), max((max(times) for times in recent), default=1.0)


def _trend(view: View, row: FleetRow, stale: str) -> Span:
    """The newest step times, all workers on one scale: who is slow stands out."""
    line = view.snap.series.get(row.coord, {}).get("step_s")
    if line is None or not len(line):
        return "", ""
    low, most = _scale_of(_Same(view.snap.series))
    return spark(line.recent(TREND), TREND, view.glyphs, low=low, high=most), stale or "accent"


def _c(key: str, title: str, width: int, align: str = "l", importance: int = 0, stretch: bool = False) -> Column:
    return Column(key, title, width, align, importance, stretch)


# fmt: off
_ALL: Final = (
    FleetColumn(_c("pod", "pod", 10, stretch=True), lambda r: r.pod,
                lambda v, r, s: (clean(r.pod), party_role(r.party))),
    FleetColumn(_c("coord", "worker", 8, "l", 7), lambda r: r.coord, lambda v, r, s: (r.coord, "muted")),
    FleetColumn(_c("party", "party", 5, "l", 8), lambda r: float(r.party),
                lambda v, r, s: (f"P{r.party}" if r.party >= 0 else "-", party_role(r.party))),
    FleetColumn(_c("rank", "rank", 4, "r", 2), _beat("rank"), _limits(_beat("rank"), 1e9, 1e9, "")),
    FleetColumn(_c("phase", "phase", 8, "l", 6), lambda r: r.phase or r.pod_state,
                lambda v, r, s: (r.phase or r.pod_state, s or "muted")),
    FleetColumn(_c("step", "step", 6, "r"), lambda r: float(r.step), _step),
    FleetColumn(_c("beat", "heartbeat", 12, "l", 1), lambda r: r.age, _heard, falls=True),
    FleetColumn(_c("root", "root @ epoch", 15, "l", 4), lambda r: float(r.epoch), _root),
    FleetColumn(_c("loss", "loss", 7, "r", 3), _beat("loss"), _number(_beat("loss")), falls=True),
    FleetColumn(_c("rate", "rate/s", 7, "r", 8), rate_of, _number(rate_of, 3)),
    FleetColumn(_c("gpu", "GPU", 5, "r", 5), _vital("gpu"), _limits(_vital("gpu"), 1e9, 1e9, " %")),
    FleetColumn(_c("gmem", "GPU mem", 7, "r", 9), _vital("gmem"), _limits(_vital("gmem"), 95, 98, " %"), falls=True),
    FleetColumn(_c("temp", "temp", 5, "r", 8), _vital("temp"), _limits(_vital("temp"), 87, 93, "°C"), falls=True),
    FleetColumn(_c("power", "power", 6, "r", 9), _vital("power"), _limits(_vital("power"), 1e9, 1e9, " W"), falls=True),
    FleetColumn(_c("cpu", "CPU", 5, "r", 10), _vital("cpu"), _limits(_vital("cpu"), 1e9, 1e9, " %"), falls=True),
    FleetColumn(_c("mem", "MiB", 6, "r", 9), _beat("mem_mib"), _limits(_beat("mem_mib"), 1e9, 1e9, ""), falls=True),
    FleetColumn(_c("trend", "step time", TREND, "r", 8), _vital("step_s"), _trend, falls=True),
    FleetColumn(_c("waits", "waits for", 14, "l", 11), lambda r: str(Waiting.of(r.beat) or ""),
                lambda v, r, s: (clean(str(Waiting.of(r.beat) or "")), "warn"), falls=True),
    FleetColumn(_c("link", "paths", 7, "l", 10), lambda r: r.pod, _paths),
    FleetColumn(_c("state", "state", 13), lambda r: float(r.health.rank), _state),
)
# fmt: on
COLUMNS: Final[Mapping[str, FleetColumn]] = {c.key: c for c in _ALL}
_PRIVATE: Final = (
    "pod",
    "coord",
    "party",
    "phase",
    "step",
    "beat",
    "root",
    "loss",
    "rate",
    "mem",
    "trend",
    "link",
    "state",
)
_LM: Final = ("pod", "coord", "rank", "phase", "step", "beat", "loss", "rate", "mem", "trend", "waits", "link", "state")
_CARDS: Final = ("gpu", "gmem", "temp", "power")


def usual(view: View) -> tuple[str, ...]:
    """The columns for this kind of run; those of cards where there are any."""
    s = view.snap
    names = _PRIVATE if s.proves else _LM
    if not any(p.gpus for p in s.pods.values()):
        return names
    at = names.index("mem")
    return (*names[:at], *_CARDS, *names[at:])


def chosen(view: View, names: Sequence[str]) -> list[Column]:
    """The columns to draw: those named, else the usual ones. Named ones are never dropped for others."""
    wanted = [COLUMNS[n].column for n in names if n in COLUMNS] if names else [COLUMNS[n].column for n in usual(view)]
    if names:
        wanted = [Column(c.key, c.title, c.width, c.align, i, c.stretch) for i, c in enumerate(wanted)]
    if names and not any(c.stretch for c in wanted):
        last = wanted[-1]  # a number stays beside its neighbour, a text may be long
        wanted[-1] = replace(last, stretch=True, most=last.width if last.align == "r" else 0)
    longest = max((len(p) for p in view.snap.pods), default=0)
    return [CURSOR, *(replace(c, most=max(c.width, longest)) if c.stretch and c.key == "pod" else c for c in wanted)]


def parsed(text: str) -> tuple[str, ...]:
    """Columns as an operator names them, by key or heading. Raises ConfigError naming the one that there is not."""
    by_title = {c.column.title.lower().replace(" ", ""): c.key for c in _ALL}
    out: list[str] = []
    for word in text.replace(",", " ").split():
        key = word.lower() if word.lower() in COLUMNS else by_title.get(word.lower(), "")
        if not key:
            near = nearest(word.lower(), COLUMNS)
            raise ConfigError(
                f"the fleet has no column {word!r}", f"did you mean {near}? there are {', '.join(COLUMNS)}"
            )
        if key not in out:
            out.append(key)
    return tuple(out)


def ordered(rows: Sequence[FleetRow], sort: str, *, reverse: bool = False) -> list[FleetRow]:
    """Rows by a column, by ``worst`` health, or by ``place``; ties keep their place, what has no value comes last."""
    if sort == "place":
        return list(reversed(rows)) if reverse else list(rows)
    if sort == "worst":
        return sorted(rows, key=lambda r: r.health.rank, reverse=reverse)
    column = COLUMNS[sort]
    told = [(v, r) for r in rows if (v := column.value(r)) is not None]
    told.sort(key=lambda pair: (isinstance(pair[0], str), pair[0]), reverse=column.falls != reverse)
    return [r for _, r in told] + [r for r in rows if column.value(r) is None]
