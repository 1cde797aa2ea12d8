"""``uvcc package RUN``: everything that an auditor needs, in one archive."""

from __future__ import annotations

from pathlib import Path

from uvcc_console.cli import common
from uvcc_console.cli.main import OK


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "package",
        "Pack a run for an auditor: bundles, transcripts, logs, figures, index.html, HOWTO.md, the format, a manifest, "
        "and verify.py, which checks all of it with Python and ssh-keygen alone. `uvcc verify ARCHIVE` reads it, too.",
    )
    parser.add_run()
    parser.add_argument("--format", choices=("tar.zst", "zip"), default="tar.zst", help="tar.zst (default) or zip")
    parser.add_argument("--output", type=Path, metavar="FILE", help="another file than ./RUN.uvcc.tar.zst")
    parser.add_argument(
        "--timestamp", default="", metavar="URL", help="an RFC 3161 service that dates what lacks a stamp"
    )
    parser.add_argument(
        "--log", default="", metavar="URL", help="a transparency log like Rekor: enter what was not entered yet"
    )
    parser.add_argument("--log-key", default="", metavar="PEM", help="the log's public key (default: as it says)")
    parser.add_json()
    args = parser.parse_args(argv)
    run_dir = common.find_run(args.run)
    from uvcc_console.report.archive import write_package
    from uvcc_console.report.publishing import PublicLog

    log_to = PublicLog(args.log, args.log_key) if args.log else None
    path, drawn = write_package(run_dir, args.format, args.output, args.timestamp, log_to)
    size = path.stat().st_size
    if args.json:
        common.emit({"run": run_dir.name, "file": str(path), "bytes": size, "not_drawn": dict(drawn.skipped)})
        return OK
    common.show(str(path))
    for name, why in drawn.skipped.items():
        common.say(f"not drawn: {name} ({why})")
    common.say(
        f"{size / 1e6:.1f} MB. Give it to the auditor; tell your key by another way. HOWTO.md in it says the rest."
    )
    return OK
