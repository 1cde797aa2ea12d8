"""``uvcc timestamp PATH --authority CERT``: when a run's policies and bundles existed, by a service one trusts."""

from __future__ import annotations

import contextlib
from pathlib import Path

from uvcc_console.cli import common
from uvcc_console.cli.evidence.verify import path_of
from uvcc_console.cli.main import OK


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "timestamp",
        "Check the RFC 3161 time stamps of a run or package: when its policies (before the first step) and its proof "
        "bundles existed. A profile asks for them with evidence.timestamp.",
    )
    parser.add_argument("path", help="a run, an archive, or the folder of a phase")
    parser.add_argument(
        "--authority", type=Path, required=True, metavar="PEM", help="the certificate of the service that you trust"
    )
    parser.add_json()
    args = parser.parse_args(argv)
    from uvcc_console.report import received, timestamps
    from uvcc_engine.transcript.proof import package

    path = path_of(args.path)
    with contextlib.ExitStack() as folders:
        home = folders.enter_context(received.unpacked(path)) if received.is_archive(path) else path
        target = package.find(home)
        target.deciding()  # of a run without a bundle nothing could be said
        found = {name: timestamps.check(file.parent, args.authority) for name, file in target.phases.items()}
    if args.json:
        common.emit({name: {s.file.name: s.at for s in stamps} for name, stamps in found.items()})
        return OK
    for name, stamps in found.items():
        for each in stamps:
            common.show(f"{name or 'bundle'}: {each.text}")
    return OK
