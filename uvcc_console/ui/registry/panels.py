"""The panels of the run screen: one table, from which its layout, the keys, the commands and the help come.

A further panel is one file: a :class:`~uvcc_console.ui.widgets.panel.Panel` with its styles in ``DEFAULT_CSS``, and a
:class:`PanelSpec` in the entry-point group ``uvcc.panels`` of its package::

    [project.entry-points."uvcc.panels"]
    power = "uvcc_power:PANEL"
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Final, Literal

from uvcc_engine.contract.errors import ConfigError

GROUP: Final = "uvcc.panels"
Place = Literal["left", "right", "page", "below"]


@dataclass(frozen=True, slots=True)
class PanelSpec:
    """One panel. ``id`` is the word of its command, ``key`` the digit that opens its page.

    ``place``: a column of the overview, "below" both, or "page" for a panel that is seen on its page alone. ``widget``
    names its class as ``module:Class``; it is imported when the screen is made. ``cli``: its twin without a screen.
    """

    id: str
    key: str
    name: str
    description: str
    place: Place
    widget: str
    cli: str = ""

    def load(self) -> Any:
        """The widget's class. Raises ConfigError where it cannot be imported."""
        module, _, name = self.widget.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as e:
            raise ConfigError(f"the panel {self.id} cannot be loaded: {e}", "reinstall or remove its package") from e


_PANELS: Final = "uvcc_console.ui.panels"
_OWN: Final = (
    PanelSpec(
        "fleet", "1", "Fleet", "every worker, worst first", "left", f"{_PANELS}.fleet:FleetPanel", "uvcc status RUN"
    ),
    PanelSpec("charts", "2", "Charts", "everything measured, over steps", "left", f"{_PANELS}.charts:ChartsPanel"),
    PanelSpec("log", "3", "Log", "events of all pods, merged", "below", f"{_PANELS}.log_view:LogView"),
    PanelSpec(
        "plane",
        "4",
        "NCCL & plane",
        "who waits for whom, channels, collectives",
        "page",
        f"{_PANELS}.plane:PlanePanel",
    ),
    PanelSpec("pod", "", "Pod", "one pod alone: Enter on it in Fleet", "page", f"{_PANELS}.pod_page:PodPanel"),
    PanelSpec(
        "ledger",
        "5",
        "Ledger",
        "agreement of the parties, roots, verdicts",
        "right",
        f"{_PANELS}.ledger:LedgerPanel",
    ),
    PanelSpec("rollout", "6", "Rollout", "stages and gates", "right", f"{_PANELS}.rollout:RolloutPanel"),
    PanelSpec("cost", "7", "Cost", "spending and limits", "right", f"{_PANELS}.cost:CostPanel"),
)


def table(added: Iterable[PanelSpec] = ()) -> tuple[PanelSpec, ...]:
    """Our own panels and those ``added``. Raises ConfigError where one takes the key or the word of another."""
    found = list(_OWN)
    for spec in added:
        other = next((p for p in found if spec.id == p.id or (spec.key and spec.key == p.key)), None)
        if other is not None:
            raise ConfigError(f"the panel {spec.id} takes the word or key of {other.id}", "remove its package")
        if spec.key and not (len(spec.key) == 1 and spec.key in "89"):
            raise ConfigError(f"the panel {spec.id} wants the key {spec.key!r}", "panels from outside have 8 or 9")
        found.append(spec)
    return tuple(found)


@cache
def panels() -> tuple[PanelSpec, ...]:
    """Every panel there is, those of installed packages included. Raises ConfigError."""
    added = [point.load() for point in entry_points(group=GROUP)]
    if wrong := [type(spec).__name__ for spec in added if not isinstance(spec, PanelSpec)]:
        raise ConfigError(f"a package offers a {wrong[0]} as a panel", f"the group {GROUP} wants PanelSpec")
    return table(added)
