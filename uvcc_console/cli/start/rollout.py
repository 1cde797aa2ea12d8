"""``uvcc rollout PROFILE``: plan, show the price, ask, run."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, Final

from uvcc_console.cli import common
from uvcc_console.cli.main import FAILED
from uvcc_console.cli.parties.propose import add_relay, meeting
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.text import clean

if TYPE_CHECKING:
    from uvcc_console.cli.screen.launch import SeatAtTable
    from uvcc_console.federation.rendezvous import Rendezvous

# options of the runbook that set keys of the profile: option, what argparse makes of it, the key, what it does
_FLAGS: Final[tuple[tuple[str, dict[str, Any], str, str], ...]] = (
    ("--no-dp-preflight", {"action": "store_const", "const": "false"}, "dp_preflight",
     "do not rehearse the run's network before the smoke"),
    ("--keep-pods", {"action": "store_const", "const": "true"}, "fleet.keep_pods",
     "leave the pods after a good end; a process ends them at limits.ttl"),
    ("--attach-prefix", {"metavar": "PREFIX"}, "fleet.attach_prefix",
     "uvcc-RUN-: use the pods that this run kept, create none"),
)  # fmt: skip


def approved_document(proposal_id: str) -> bytes:
    """A proposal that this installation keeps, with its domains' approvals. Raises ConfigError if not all approved."""
    import json

    from uvcc_console.federation.domain_key import fingerprint
    from uvcc_console.federation.rendezvous import kept

    standing = kept(proposal_id)
    p = standing.signed.proposal
    lacking = [f"P{n}" for n in range(PARTIES) if n not in standing.said or standing.said[n][0].decision != "approve"]
    if lacking:
        who = f"the coordinator {fingerprint(p.coordinator)}"
        what = f"proposal {p.id[:12]} of {who} is not approved by {', '.join(lacking)}"
        refused = [
            f"P{n}: {clean(word.reason)}" for n, (word, _) in sorted(standing.said.items()) if f"P{n}" in lacking
        ]
        if refused:
            hint = "a refusal stands; uvcc propose makes another proposal"
            raise ConfigError(f"{what}; refused by {'; '.join(refused)}", hint)
        raise ConfigError(what, "uvcc proposals fetches what the domains said since")
    return json.dumps(standing.to_json(), indent=1).encode() + b"\n"


def fetch(proposal_id: str, there: Rendezvous) -> None:
    """Keep what the domains have said of a proposal by now. Raises ConfigError, ProtocolError naming a coordinator."""
    from uvcc_console.federation import rendezvous

    found, twice = there.look()
    standing = rendezvous.chosen(found, proposal_id)
    rendezvous.check_no_equivocation(standing.signed, twice)
    rendezvous.keep(standing)


def _own_pods(proposal_id: str) -> list[str]:
    """This domain's own fleet in the profile's place, as it joined; nothing where it named none.

    Raises ConfigError where the proposal does not name this domain.
    """
    import json

    from uvcc_console.federation import domain_key, own_fleet
    from uvcc_console.federation.rendezvous import kept

    ours, proposal = domain_key.load(), kept(proposal_id).signed.proposal
    party = proposal.party_of(ours.public)
    fleet = own_fleet.of(ours, proposal)
    if fleet:
        own_fleet.check(fleet, proposal, party)
        common.say(f"own pods: {own_fleet.words(fleet)}")
    return [f"fleet={json.dumps(fleet)}"] if fleet else []


def _seat(args: argparse.Namespace, agreed: bytes) -> SeatAtTable:
    """This domain's seat in the run of a proposal. Raises ConfigError where the proposal does not name this domain."""
    from functools import partial

    from uvcc_console.cli.screen.launch import SeatAtTable
    from uvcc_console.federation import domain_key, seat
    from uvcc_console.plan.federated import of_domain
    from uvcc_engine.transcript.formats.reading import parse_json
    from uvcc_engine.transcript.signed.proposals import Standing

    proposal = Standing.from_json(parse_json(agreed, "the proposal")).signed.proposal
    party = proposal.party_of(domain_key.load().public)
    terms = seat.SeatTerms(relay=args.relay, ca_file=args.ca_file, wait_s=args.wait, silence_s=args.silence)
    token = meeting(args).token
    return SeatAtTable(
        part=lambda plan: of_domain(plan, proposal, party), take=partial(seat.take, terms=terms, token=token)
    )


def run(argv: list[str]) -> int:
    parser = common.Parser("rollout", "Run a profile from plan to tear-down.")
    parser.add_argument("profile", metavar="PROFILE", help="name or path, see: uvcc profiles")
    parser.add_argument("--headless", action="store_true", help="progress line instead of the console")
    parser.add_argument("--yes", action="store_true", help="do not ask before spending money")
    parser.add_argument("--seed", type=int, metavar="N", help="repeatable identities and roots (demonstrations only)")
    parser.add_argument(
        "--proposal", default="", metavar="ID", help="only as three domains approved it: uvcc proposals"
    )
    parser.add_argument(
        "--domain", action="store_true", help="with --proposal: as one of its domains, on this domain's own pods only"
    )
    parser.add_argument("--wait", type=float, default=900.0, metavar="S", help="with --domain: for the others (900)")
    parser.add_argument(
        "--silence", type=float, default=90.0, metavar="S", help="with --domain: until a silent domain is gone (90)"
    )
    add_relay(parser, required=False)
    parser.add_argument("--quiet", action="store_true", help="no progress, only the summary")
    for option, kind, key, about in _FLAGS:
        parser.add_argument(option, dest=key, help=about, **kind)
    parser.add_set()
    parser.add_json()
    args = parser.parse_args(argv)
    given = {key: getattr(args, key) for _, _, key, _ in _FLAGS}
    args.set += [f"{key}={value}" for key, value in given.items() if value is not None]
    if args.domain and not (args.proposal and args.relay and args.token_file):
        parser.error("--domain needs --proposal, --relay and --token-file")
    from uvcc_console.cli.screen.launch import has_terminal, launch
    from uvcc_console.fleet.provider_kinds import kind_in
    from uvcc_console.plan.plan import make_plan, new_run_id, operation_of
    from uvcc_console.plan.profile import load

    if args.domain:
        fetch(args.proposal, meeting(args))
        args.set = [*_own_pods(args.proposal), *args.set]
    name, profile = load(args.profile, args.set)
    agreed = approved_document(args.proposal) if args.proposal else b""
    seat = _seat(args, agreed) if args.domain else None
    if kind_in(profile.fleet.model_dump(mode="json")).consents and not args.yes:
        plan = make_plan(new_run_id(name), name, profile)
        for sentence in operation_of(seat.part(plan) if seat is not None else plan):
            common.say(sentence)
        limits = profile.limits
        question = f"{name}: up to {limits.hourly:.2f} $/h and {limits.total:.2f} $ in total on {profile.fleet.where}"
        if not sys.stdin.isatty():
            raise ConfigError(question, "say --yes to agree without a terminal")
        sys.stderr.write(clean(f"{question}. Go on? [y/N] "))
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return FAILED
    tui = has_terminal() and not (args.headless or args.json or args.quiet)
    return launch(
        args.profile,
        args.set,
        seed=None if args.domain else args.seed,
        tui=tui,
        as_json=args.json,
        quiet=args.quiet,
        proposal=agreed,
        seat=seat,
    )
