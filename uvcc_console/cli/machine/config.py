"""``uvcc config``: the operator's own settings, each with its value and where it came from."""

from __future__ import annotations

from uvcc_console.cli import common
from uvcc_console.core import settings


def _row(s: settings.OwnSetting) -> dict[str, object]:
    return {"key": s.known.key, "value": s.value, "source": s.source, "about": s.known.about}


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "config",
        "The settings of this machine's operator: from the environment, else from config.yaml in the configuration "
        "folder, else the default.",
    )
    parser.add_json()
    args = parser.parse_args(argv)
    found = settings.effective()
    if args.json:
        common.emit({"file": str(settings.path()), "settings": [_row(s) for s in found.values()]})
        return 0
    there = "" if settings.path().exists() else " (not there: every line below is optional)"
    common.show(f"file {settings.path()}{there}")
    for s in found.values():
        value = str(s.value).lower() if isinstance(s.value, bool) else s.value or "-"
        common.show(f"{s.known.key:<16} {value:<24} {s.source}")
        common.show(f"{'':<16} {s.known.about}; ${s.known.variable}")
    return 0
