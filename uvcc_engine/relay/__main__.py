"""``python -m uvcc_engine.relay --config FILE``: the relay service."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.machine.raising_parser import RaisingParser
from uvcc_engine.relay import config


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; returns the exit code."""
    parser = RaisingParser(prog="uvcc-engine relay", description="Store and forward between parties.")
    parser.add_argument("--config", type=Path, required=True, help="JSON file, mode 0600; holds the credentials")
    try:
        options = parser.parse_args(argv)
        loaded = config.load(options.config)
        from uvcc_engine.relay.server import run

        run(loaded)
    except UvccError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
