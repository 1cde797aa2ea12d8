"""``uvcc bundle RUN``: all logs of a run in one explained file, free of secrets."""

from __future__ import annotations

from pathlib import Path

from uvcc_console.cli import common


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "bundle",
        "Write all_logs_explained.md (and .zst): what ran, who, key figures, every log with its SHA-256, the verdict. "
        "Refuses anything shaped like a share, key or token.",
    )
    parser.add_run()
    parser.add_argument("--output", type=Path, metavar="FILE", help="another place than the run's artifacts")
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="PATTERN", help="list but do not quote a file"
    )
    parser.add_json()
    args = parser.parse_args(argv)
    run_dir = common.find_run(args.run)
    from uvcc_console.report.logbundle import write_bundle

    written = [str(p) for p in write_bundle(run_dir, args.output, args.exclude)]
    if args.json:
        common.emit({"run": run_dir.name, "files": written})
    else:
        common.show("\n".join(written))
    return 0
