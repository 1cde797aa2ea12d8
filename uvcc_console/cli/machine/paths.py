"""``uvcc paths``: where files lie."""

from __future__ import annotations

from uvcc_console.cli import common
from uvcc_console.core import paths


def run(argv: list[str]) -> int:
    parser = common.Parser("paths", "Where files lie on this machine; UVCC_HOME moves them.")
    parser.add_json()
    args = parser.parse_args(argv)
    from uvcc_console.plan.profile import folders

    found: dict[str, str | list[str]] = {
        "data": str(paths.data_dir()),
        "config": str(paths.config_dir()),
        "runs": str(paths.runs_dir()),
        "profiles": [str(f) for f in folders() if f.is_dir()],
    }
    from uvcc_console.report import collector

    if key := collector.public_line():
        found["collector"] = f"collector {key}"
    runs = common.run_dirs()
    if runs:
        found["last_run"] = str(runs[-1])
        found["last_artifacts"] = str(runs[-1] / "artifacts")
    if args.json:
        common.emit(found)
        return 0
    for name, value in found.items():
        for one in value if isinstance(value, list) else [value]:
            common.show(f"{name:<15} {one}")
    return 0
