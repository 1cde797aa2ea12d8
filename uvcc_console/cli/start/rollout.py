"""``uvcc rollout PROFILE``: plan, show the price, ask, run."""

from __future__ import annotations

import sys

from uvcc_console.cli import common
from uvcc_console.cli.main import FAILED, USAGE
from uvcc_engine.contract.text import clean
from uvcc_engine.contract.topology import PARTIES

# options of the runbook that are keys of the profile
_FLAGS = {
    "dp_preflight": "true or false: rehearse the run's network before the smoke (true)",
    "fleet.keep_pods": "true or false: leave the pods after a good end; a process ends them at limits.ttl (false)",
    "fleet.attach_prefix": "uvcc-RUN-: use the pods that this run kept, create none",
}


def approved_document(proposal_id: str) -> bytes:
    """A proposal that this installation keeps, with its domains' approvals. Raises ConfigError if not all approved."""
    import json

    from uvcc_console.federation.rendezvous import kept
    from uvcc_engine.contract.errors import ConfigError

    standing = kept(proposal_id)
    lacking = [f"P{n}" for n in range(PARTIES) if n not in standing.said or standing.said[n][0].decision != "approve"]
    if lacking:
        what = f"proposal {standing.signed.proposal.id[:12]} is not approved by {', '.join(lacking)}"
        raise ConfigError(what, "uvcc proposals fetches what the domains said since")
    return json.dumps(standing.to_json(), indent=1).encode() + b"\n"


def run(argv: list[str]) -> int:
    parser = common.Parser("rollout", "Run a profile from plan to tear-down.")
    parser.add_argument("profile", metavar="PROFILE", help="name or path, see: uvcc profiles")
    parser.add_argument("--headless", action="store_true", help="progress line instead of the console")
    parser.add_argument("--yes", action="store_true", help="do not ask before spending money")
    parser.add_argument("--seed", type=int, metavar="N", help="repeatable identities and roots (demonstrations only)")
    parser.add_argument(
        "--proposal", default="", metavar="ID", help="only as three domains approved it: uvcc proposals"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress, only the summary")
    for key, about in _FLAGS.items():
        parser.add_argument(f"--{key.rpartition('.')[2].replace('_', '-')}", metavar="VALUE", help=about)
    parser.add_set()
    parser.add_json()
    args = parser.parse_args(argv)
    given = {key: getattr(args, key.rpartition(".")[2]) for key in _FLAGS}
    args.set += [f"{key}={value}" for key, value in given.items() if value is not None]
    from uvcc_console.cli.screen.launch import has_terminal, launch
    from uvcc_console.fleet.provider_kinds import kind_in
    from uvcc_console.plan.plan import make_plan, new_run_id, operation_of
    from uvcc_console.plan.profile import load

    name, profile = load(args.profile, args.set)
    if kind_in(profile.fleet.model_dump(mode="json")).consents and not args.yes:
        for sentence in operation_of(make_plan(new_run_id(name), name, profile)):
            common.say(sentence)
        limits = profile.limits
        question = f"{name}: up to {limits.hourly:.2f} $/h and {limits.total:.2f} $ in total on {profile.fleet.where}"
        if not sys.stdin.isatty():
            common.say(f"uvcc: {question}\n  say --yes to agree without a terminal")
            return USAGE
        sys.stderr.write(clean(f"{question}. Go on? [y/N] "))
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return FAILED
    agreed = approved_document(args.proposal) if args.proposal else b""
    tui = has_terminal() and not (args.headless or args.json or args.quiet)
    return launch(args.profile, args.set, seed=args.seed, tui=tui, as_json=args.json, quiet=args.quiet, proposal=agreed)
