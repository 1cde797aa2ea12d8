"""``uvcc join PROPOSAL``: read one proposal whole, and approve or refuse it with this domain's key.

Exit codes: 0 approved; 1 refused, by the site policy or by a person, or its coordinator told two tales; 2 wrong usage.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Literal

from uvcc_console.cli import common
from uvcc_console.cli.main import FAILED, OK
from uvcc_console.cli.parties.propose import add_relay, meeting
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.text import clean


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "join",
        "Show what a proposal would compute, reveal and cost; approve or refuse it. It ends with 0 only where it is "
        "approved: also with 1 where a refusal that was asked for is signed, and where nothing is.",
    )
    parser.add_argument("proposal", metavar="PROPOSAL", help="its id, or the beginning of it; see: uvcc proposals")
    parser.add_argument("--refuse", default="", metavar="REASON", help="refuse it for good: a refusal stands")
    parser.add_argument("--fleet", type=Path, metavar="FILE", help="YAML of this domain's own pods: provider, account")
    parser.add_argument("--yes", action="store_true", help="approve without asking, where the site policy lets it")
    add_relay(parser)
    args = parser.parse_args(argv)
    from uvcc_console.federation import domain_key, own_fleet, proposing, rendezvous, site_policy
    from uvcc_engine.contract.peer_protocol.record_names import APPROVALS, PROPOSALS
    from uvcc_engine.transcript.signed import approvals

    ours, there = domain_key.load(), meeting(args)
    found, twice = there.look()
    standing = rendezvous.chosen(found, args.proposal)
    p = standing.signed.proposal
    party = p.party_of(ours.public)
    rendezvous.check_no_equivocation(standing.signed, twice)
    judged = site_policy.evaluate(p, site_policy.load(ours.folder / site_policy.FILE), ours.public, time.time())
    fleet = own_fleet.read(args.fleet) if args.fleet else own_fleet.of(ours, p)
    if fleet and not args.refuse:
        own_fleet.check(fleet, p, party)
    common.show("\n".join(proposing.screen(standing, judged)))
    if fleet:
        common.show(f"own pods     {own_fleet.words(fleet)}")
    if not args.refuse and (own := proposing.own_code()) != p.code_hash:
        common.show(f"own code     {own}: not the proposal's; install its release here before uvcc rollout")
    reason = args.refuse or "; ".join(f"{rule}: {why}" for rule, why in judged.refused)
    if not reason and not (args.yes and judged.yes):
        if not sys.stdin.isatty():
            why = "the site policy's yes_for does not name its coordinator" if args.yes else "nobody is there to ask"
            raise ConfigError(why, "approve it at a terminal, or say --refuse REASON")
        if not common.agreed(f"Approve {p.name} as P{party}?"):  # a slip of the finger, or no line at all, ends nothing
            common.say("nothing was signed; approve it later, or refuse it for good with --refuse REASON")
            return FAILED
    if not reason and rendezvous.refused_before(standing, party):
        what = f"this domain refused {p.id[:12]} before, and a refusal stands: the others may have heard it"
        raise ConfigError(what, "the coordinator makes another proposal of the same profile: uvcc propose")
    decision: Literal["approve", "refuse"] = "refuse" if reason else "approve"
    word = approvals.Approval(
        of="proposal", sha256=p.id, party=party, decision=decision, reason=clean(reason)[: approvals.LONGEST_REASON]
    )
    body = approvals.signed(word, lambda payload: ours.sign(approvals.APPROVAL_NAMESPACE, payload))
    if args.fleet and not reason:
        own_fleet.keep(ours, p, fleet)
    rendezvous.keep(standing.hearing(body))  # here first: a domain never forgets what it signed
    there.leave(f"{PROPOSALS}{p.id}", standing.signed.body)  # the very text that was shown here
    there.leave(f"{APPROVALS}{p.id}/{party}", body)
    common.say(f"signed as P{party}: {decision}" + (f" ({reason})" if reason else ""))
    return FAILED if reason else OK
