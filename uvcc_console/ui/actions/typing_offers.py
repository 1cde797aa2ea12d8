"""What may come next on the ``:`` and ``/`` lines."""

from __future__ import annotations

from uvcc_console.ui.actions import compared
from uvcc_console.ui.actions.log_actions import texts
from uvcc_console.ui.panels.fleet_columns import COLUMNS
from uvcc_console.ui.registry.keys import COMMANDS
from uvcc_console.ui.run_base import RunConsole
from uvcc_console.ui.widgets.ring import FLEET_ONLY

FIELDS = ("level>=", "pod=", "party=", "source=", "file=", *(f"{name}=" for name in sorted(FLEET_ONLY)))
_PODS = ("pod", "stackdump", "fetch", "restart", "replace", "tensorboard")
MOST = 40


def words(app: RunConsole, kind: str, text: str) -> list[str]:
    """What the last word of the line may be."""
    if kind == "filter":
        last = text.rpartition(" ")[2].lstrip("!")
        if last.startswith("level>="):
            return [f"level>={level}" for level in ("info", "warn", "error")]
        if last.startswith("pod="):
            return [f"pod={name}" for name in app.snap.pods]
        return list(FIELDS)
    command, given, _ = text.partition(" ")
    if not given:
        return sorted(COMMANDS)
    if command in _PODS:
        return list(app.snap.pods)
    if command in ("sort", "columns"):
        return [*(("worst", "place", "asc", "desc") if command == "sort" else ("usual",)), *COLUMNS]
    if command == "compare":
        return [] if app.alone else compared.others(app.run_dir)
    if command == "theme":
        return ["dark", "light", *sorted(app.available_themes)]
    if command == "view":
        return [str(p.relative_to(app.run_dir / "artifacts")) for p in texts(app.run_dir)[:MOST]]
    if command == "goto":
        return ["step ", "event ", "halt", "resume", "failed", "fork", "start", "end"]
    return []
