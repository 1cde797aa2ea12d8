"""Figure 1 of a report: the grid of workers as it ran, pipeline stages, tensor ranks within them, replicas below.

A worker is filled if it was started; a line is drawn through if the workers at its ends reported that group as ready.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from uvcc_console.core import events as ev
from uvcc_console.report import metrics
from uvcc_console.report.record import RunRecord, parse
from uvcc_engine.contract.job.topology import PARTIES, Coord, Topology
from uvcc_engine.contract.parsing.untrusted import scalar_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS: Final = ("coord", "party", "replica", "stage", "tensor", "started", "groups_ready")
GridRow = tuple[str, int, int, int, int, int, str]
_PARTY: Final = ("#4477aa", "#ee6677", "#228833")
_GROUP: Final = {"tp": "#1b9e77", "pp": "#d95f02", "dp": "#7570b3"}
# the parties of one place stand aslant, so that no line of one passes through another; ranks stand below each other
_WIDE, _LOW, _APART = 0.2, 0.12, 0.42
_INNER: Final = _WIDE * (PARTIES - 1)


def rows(record: RunRecord) -> list[GridRow]:
    """Every place of the grid, with what is known of its worker; none for a run whose workers told nothing."""
    size = record.size
    started = {str(c) for e in record.of(ev.WorkerProcess) if (c := parse(e.coord)) is not None}
    if not started:
        return []
    ready: dict[str, set[str]] = {}
    for init in metrics.group_inits(record):
        ready.setdefault(init.coord, set()).add(init.group)
    for event in record.engine_events("dp_ready", "dp_ok"):
        ready.setdefault(scalar_text(event.fields.get("coord")), set()).add("dp")
    return [
        (
            *(str(c), c.party, c.replica, c.stage, c.tensor),
            int(str(c) in started),
            " ".join(g for g in metrics.GROUPS if g in ready.get(str(c), ())),
        )
        for c in sorted(size.coords(), key=lambda c: (c.replica, c.stage, c.tensor, c.party))
    ]


def height(found: Sequence[Sequence[Any]]) -> float:
    """Inches that a drawing of these rows takes."""
    replicas, ranks = (1 + max((int(r[at]) for r in found), default=0) for at in (2, 4))
    return max(2.4, 1.0 + 0.9 * replicas * (0.3 + 0.45 * ranks))


def draw(axes: Axes, found: Sequence[Sequence[Any]]) -> None:
    """Boxes are stages of one replica; in each, three dots aslant are a tensor rank with its three parties."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import FancyBboxPatch

    size = Topology(*(1 + max(int(r[at]) for r in found) for at in (2, 3, 4)))
    ready = {str(r[0]): str(r[6]).split() for r in found}
    started = {str(r[0]) for r in found if r[5]}
    for replica in range(size.replicas):
        for stage in range(size.stages):
            x, y = _corner(size, replica, stage)
            box = FancyBboxPatch((x, y), _INNER, _deep(size), boxstyle="round,pad=0.07", fc="none", ec="#999999")
            axes.add_patch(box)
    for group, one, other in _lines(size):
        (x, y), (u, v) = _place(size, one), _place(size, other)
        sure = all(group in ready.get(str(c), ()) for c in (one, other))
        axes.plot([x, u], [y, v], color=_GROUP[group], lw=1.1 if sure else 0.6, ls="-" if sure else ":", zorder=1)
    for c in size.coords():
        x, y = _place(size, c)
        colour = _PARTY[c.party]
        axes.plot([x], [y], "o", ms=6, mec=colour, mfc=colour if str(c) in started else "white", zorder=2)
    axes.set_aspect("equal")
    axes.set_xlim(-0.3, max(2.4, _corner(size, 0, size.stages - 1)[0] + _INNER) + 0.3)  # one box is no banner
    axes.set_xticks([_corner(size, 0, s)[0] + _INNER / 2 for s in range(size.stages)])
    axes.set_xticklabels([f"stage {s}" for s in range(size.stages)])
    axes.set_yticks([_corner(size, r, 0)[1] + _deep(size) / 2 for r in range(size.replicas)])
    axes.set_yticklabels([f"replica {r}" for r in range(size.replicas)])
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.invert_yaxis()
    parties = [Line2D([], [], ls="", marker="o", color=_PARTY[p], label=f"P{p}") for p in range(PARTIES)]
    used = {group for group, _, _ in _lines(size)}
    groups = [Line2D([], [], color=colour, label=g.upper()) for g, colour in _GROUP.items() if g in used]
    axes.legend(handles=[*parties, *groups], fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _lines(size: Topology) -> Iterator[tuple[str, Coord, Coord]]:
    """Neighbours in each dimension, of every party by itself: activations, partial sums, gradients."""
    for c in size.coords():
        if c.stage + 1 < size.stages:
            yield "pp", c, Coord(c.replica, c.party, c.stage + 1, c.tensor)
        if c.tensor + 1 < size.tensor:
            yield "tp", c, Coord(c.replica, c.party, c.stage, c.tensor + 1)
        if c.replica + 1 < size.replicas and c.tensor + 1 == size.tensor:
            yield "dp", c, Coord(c.replica + 1, c.party, c.stage, 0)


def _deep(size: Topology) -> float:
    return _APART * (size.tensor - 1) + _LOW * (PARTIES - 1)


def _corner(size: Topology, replica: int, stage: int) -> tuple[float, float]:
    return stage * (_INNER + 0.5), replica * (_deep(size) + 0.4)


def _place(size: Topology, c: Coord) -> tuple[float, float]:
    x, y = _corner(size, c.replica, c.stage)
    return x + _WIDE * c.party, y + _LOW * c.party + _APART * c.tensor
