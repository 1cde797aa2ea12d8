"""``uvcc adopt TARGET``: a run that somebody else started, followed as one of the console's own."""

from __future__ import annotations

import asyncio

from uvcc_console.cli import common
from uvcc_console.cli.main import OK
from uvcc_console.follow import adopting
from uvcc_console.follow.adopting import Adoption
from uvcc_console.follow.reader import FolderReader
from uvcc_console.follow.target import read_target
from uvcc_console.runs import processes


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "adopt",
        "Follow a folder as a run of this console: any run directory, or a bare folder with a csv, jsonl or "
        "TensorBoard log, here (DIR) or over SSH (user@host:DIR, ssh://user@host:port/DIR). Nothing is installed "
        "there, and nothing there is ever ended or deleted. It can be halted where it has the run contract, by its "
        "control file.",
    )
    parser.add_argument("target", metavar="DIR|user@host:DIR", help="the folder, as ssh and scp write it")
    common.add_way(parser)
    parser.add_argument(
        "--name", default="", metavar="WORD", help="first word of the run's id, instead of the folder's"
    )
    parser.add_argument("--headless", action="store_true", help="print the run's id instead of opening the console")
    parser.add_json()
    args = parser.parse_args(argv)
    target = read_target(args.target, args.port)
    adoption = Adoption(target, args.identity, args.jump)
    reader = asyncio.run(_looked_at(adoption))
    run_dir = adopting.create(adoption, args.name)
    processes.start(run_dir, processes.CONDUCTOR)
    if args.json:
        why = reader.why_no_halt
        common.emit({"run": run_dir.name, "target": target.words, "contract": reader.contract, "no_halt": why})
        return OK
    from uvcc_console.cli.screen.launch import has_terminal, show

    if has_terminal() and not args.headless:
        return show(run_dir)
    halt = f"no halt: {reader.why_no_halt}" if reader.why_no_halt else "it has the run contract: uvcc halt stops it"
    common.show(f"{run_dir.name} follows {target.words}; {halt}")
    return OK


async def _looked_at(adoption: Adoption) -> FolderReader:
    """The folder, seen once, so that what stands in the way is told before there is a run."""
    shell = adoption.shell()
    try:
        await shell.open()
        reader = FolderReader(shell, adoption.target.folder)
        await reader.probe()
        return reader
    finally:
        await shell.close()
