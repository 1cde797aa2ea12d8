"""The screen's layout as a value: taken from the widgets when the operator leaves, given to them when he comes."""

from __future__ import annotations

from dataclasses import fields, replace

from uvcc_console.ui.feed.kept_layout import ScreenLayout
from uvcc_console.ui.panels.charts import ChartsPanel
from uvcc_console.ui.panels.fleet import SORTS, FleetPanel
from uvcc_console.ui.panels.fleet_columns import COLUMNS
from uvcc_console.ui.panels.log_view import LogView
from uvcc_console.ui.run_base import RunConsole
from uvcc_console.ui.screens.borders import Borders
from uvcc_console.ui.widgets.curves import AXES, SMOOTH
from uvcc_console.ui.widgets.log_lines import STAMPS

_BOARD = {"": None, "board": True, "table": False}


def changes(layout: ScreenLayout) -> list[str]:
    """The parts of a layout that are not as usual, by name."""
    return [f.name for f in fields(ScreenLayout) if getattr(layout, f.name) != f.default]


def taken(app: RunConsole) -> ScreenLayout:
    """How the screen is laid out now."""
    main = app.main
    fleet, log, charts = main.query_one(FleetPanel).state, main.query_one(LogView), main.query_one(ChartsPanel)
    return ScreenLayout(
        theme="" if app.theme == app.usual_theme else app.theme,
        right=main.shape.right,
        log=main.shape.log,
        log_short=main.shape.low,
        sort="" if fleet.sort == SORTS[0] else fleet.sort,
        reverse=fleet.reverse,
        columns=fleet.columns,
        board=next(word for word, board in _BOARD.items() if board is fleet.board),
        wrap=log.wrap,
        stamp="" if log.stamp == STAMPS[0] else log.stamp,
        axis="" if charts.look.axis == AXES[0] else charts.look.axis,
        smooth=charts.look.smooth,
    )


def given(app: RunConsole, layout: ScreenLayout) -> None:
    """Lay the screen out so. Names that this version does not have are as usual."""
    main = app.main
    app.theme = layout.theme if layout.theme in app.available_themes else app.usual_theme
    main.shape = Borders(layout.right, layout.log, layout.log_short)
    fleet, log, charts = main.query_one(FleetPanel), main.query_one(LogView), main.query_one(ChartsPanel)
    fleet.state = replace(
        fleet.state,
        sort=layout.sort if layout.sort in (*SORTS, *COLUMNS) else SORTS[0],
        reverse=layout.reverse,
        columns=tuple(c for c in layout.columns if c in COLUMNS),
        board=_BOARD.get(layout.board),
    )
    log.look(wrap=layout.wrap, stamp=layout.stamp if layout.stamp in STAMPS else STAMPS[0])
    charts.look = replace(
        charts.look,
        axis=layout.axis if layout.axis in AXES else AXES[0],
        smooth=layout.smooth if layout.smooth in SMOOTH else 0.0,
    )
    main.lay_out()
