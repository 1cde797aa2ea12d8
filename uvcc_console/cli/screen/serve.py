"""``uvcc serve RUN``: the read-only console in a browser, at an address of this machine that wants a token."""

from __future__ import annotations

import asyncio
import sys

from uvcc_console.cli import common
from uvcc_console.cli.main import OK
from uvcc_engine.contract.errors import ConfigError

VIEWERS = 4


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "serve",
        "Show the console of a run in a browser, read-only; a halt there wants the run's name typed. The address that "
        "is printed carries a token: whoever has it sees the run, and can halt it. Ctrl-C ends it.",
    )
    parser.add_run()
    parser.add_argument("--port", type=int, default=0, metavar="N", help="0, the default: a free one")
    parser.add_argument("--address", default="127.0.0.1", metavar="IP", help="where to listen; 127.0.0.1 without it")
    parser.add_argument(
        "--exposed", action="store_true", help="allow an --address that other machines reach; nothing is encrypted"
    )
    parser.add_argument(
        "--viewers", type=int, default=VIEWERS, metavar="N", help=f"how many may look at once; {VIEWERS} without it"
    )
    parser.add_json()
    args = parser.parse_args(argv)
    if not 0 <= args.port <= 65535 or not 1 <= args.viewers <= 64:
        parser.error("--port takes 0 to 65535, --viewers 1 to 64")
    run_dir = common.find_run(args.run)
    try:
        from uvcc_console.ui.web import page_guard, serving
    except ImportError as e:
        if (e.name or "").partition(".")[0] not in ("aiohttp", "textual_serve", "aiohttp_jinja2", "jinja2"):
            raise
        raise ConfigError("the console in a browser needs textual-serve", "pip install 'uvcc[web]'") from None
    address = page_guard.bindable(args.address, exposed=args.exposed)
    if args.exposed:
        common.say(f"warning: what is served at {address} is not encrypted: its network reads the token and the screen")

    def ready(url: str) -> None:
        common.emit_line({"run": run_dir.name, "url": url}) if args.json else common.show(f"{url}   (Ctrl-C ends it)")
        sys.stdout.flush()

    asyncio.run(serving.serve(run_dir, serving.bound(address, args.port), args.viewers, ready))
    return OK
