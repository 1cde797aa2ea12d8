"""``uvcc propose PROFILE``: ask three domains for their approval of one run, by a signed text at a relay."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from uvcc_console.cli import common
from uvcc_console.cli.main import OK
from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.contract.parsing.small_text import MOST_TOKEN, read_small

if TYPE_CHECKING:
    from uvcc_console.federation.rendezvous import Rendezvous


def run(argv: list[str]) -> int:
    parser = common.Parser("propose", "Sign a proposal with this installation's key, and put it at a relay.")
    parser.add_argument("profile", metavar="PROFILE", help="name or path, see: uvcc profiles")
    for flag, what in (
        ("--domain", "key of P0, then P1, then P2"),
        ("--owner", "key of a data owner, the first first"),
    ):
        parser.add_argument(flag, action="append", default=[], type=Path, metavar="FILE.pub", help=what)
    parser.add_argument(
        "--providers", default="", metavar="A,B,C", help="who hosts P0, P1 and P2, where the profile does not say it"
    )
    parser.add_argument("--expires", type=float, default=24.0, metavar="HOURS", help="open for so long (24)")
    add_relay(parser)
    parser.add_set()
    parser.add_json()
    args = parser.parse_args(argv)
    from uvcc_console.federation import domain_key, proposing
    from uvcc_console.federation.rendezvous import keep
    from uvcc_engine.contract.peer_protocol.record_names import PROPOSALS
    from uvcc_engine.transcript.signed.proposals import PROPOSAL_NAMESPACE, SignedProposal, Standing

    ours, there = domain_key.load(), meeting(args)
    proposal = proposing.propose(
        args.profile,
        args.set,
        coordinator=ours.public,
        domains=[domain_key.read_public(f) for f in args.domain],
        owners=[domain_key.read_public(f) for f in args.owner],
        lasts_s=args.expires * 3600,
        tell=common.say,
        providers=[name.strip() for name in args.providers.split(",")] if args.providers else (),
    )
    signed = SignedProposal.make(proposal, lambda payload: ours.sign(PROPOSAL_NAMESPACE, payload))
    there.leave(f"{PROPOSALS}{proposal.id}", signed.body)
    keep(Standing(signed))
    if args.json:
        common.emit({"proposal": proposal.id})
    else:
        common.show("\n".join(proposing.screen(Standing(signed))))
    return OK


def add_relay(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Where the rendezvous is, and what lets one in."""
    parser.add_argument("--relay", required=required, metavar="URL", help="the relay at which the domains meet")
    parser.add_argument("--token-file", required=required, type=Path, metavar="FILE", help="this domain's token there")
    parser.add_argument(
        "--ca-file", type=_whole_path, default="", metavar="FILE", help="whose certificate the relay shows"
    )


def _whole_path(name: str) -> str:
    """The file under a name that also a conductor finds, which runs elsewhere."""
    return str(Path(name).expanduser().absolute()) if name else ""


def meeting(args: argparse.Namespace) -> Rendezvous:
    """The rendezvous that the options name. Raises UnreadableError."""
    from uvcc_console.federation.rendezvous import Rendezvous

    try:
        token = read_small(args.token_file, MOST_TOKEN).strip()
    except (OSError, ValueError) as e:
        raise UnreadableError(
            f"cannot read {args.token_file}: {e}", "whoever runs the relay gives every domain one"
        ) from e
    return Rendezvous(args.relay, token, args.ca_file)
