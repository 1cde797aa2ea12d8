"""``verify PATH``: check a proof bundle. Exit 0 if all holds, 1 if something does not, 2 if it could not be read."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from uvcc_engine.contract.errors import UvccError, VerificationError
from uvcc_engine.transcript.verifier import verify


def parser(prog: str = "verify") -> argparse.ArgumentParser:
    """The arguments of the verb."""
    made = argparse.ArgumentParser(prog=prog, description=__doc__)
    made.add_argument("path", type=Path, help="proof_bundle.json, or the folder that holds it")
    made.add_argument(
        "--allowed-signers", type=Path, metavar="F", help="OpenSSH allowed_signers file naming P0, P1, P2"
    )
    made.add_argument("--policy", type=Path, metavar="F", help="the policy.json one expects")
    made.add_argument("--transcripts", type=Path, metavar="DIR", help="transcripts (default: beside the bundle)")
    made.add_argument(
        "--against", type=Path, metavar="BUNDLE", help="a rerun that must have the same roots and results"
    )
    made.add_argument(
        "--head", type=_head, metavar="SIZE:HASH", help="a head noted while the run went on, which it must extend"
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def _head(text: str) -> tuple[int, str]:
    size, _, wanted = text.partition(":")
    if not size.isascii() or not size.isdigit() or len(size) > 10 or not re.fullmatch("[0-9a-f]{64}", wanted):
        raise argparse.ArgumentTypeError("write SIZE:HASH, the number of epochs and 64 lower-case hex digits")
    return int(size), wanted


def main(
    argv: Sequence[str], *, pins: Callable[[Path], Mapping[str, str] | None] = lambda path: None, prog: str = "verify"
) -> int:
    """Run the verb. ``pins`` finds the identities (P0.. -> key line) for a path where no --allowed-signers is given."""
    args = parser(prog).parse_args(argv)
    try:
        found = verify(
            args.path,
            allowed_signers=args.allowed_signers or pins(args.path),
            policy=args.policy,
            transcripts=args.transcripts,
            against=args.against,
            head=args.head,
        )
    except UvccError as e:
        check = e.check if isinstance(e, VerificationError) else "unreadable"
        if args.json:
            print(json.dumps({"ok": False, "check": check, "what": e.what, "cure": e.cure}))
        verdict = "NOT VERIFIED" if isinstance(e, VerificationError) else "UNREADABLE"
        print(f"{verdict}  {e}", file=sys.stderr)
        return e.exit_code
    print(json.dumps(found.to_json()) if args.json else found.text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
