"""``uvcc proposals``: what lies at a relay for one's approval, and what each domain said of it."""

from __future__ import annotations

import time
from typing import Any

from uvcc_console.cli import common
from uvcc_console.cli.main import FAILED, OK
from uvcc_console.cli.parties.propose import add_relay, meeting


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "proposals", "List the proposals at a relay, with what each domain said of them; one's own are kept."
    )
    add_relay(parser)
    parser.add_json()
    args = parser.parse_args(argv)
    from uvcc_console.federation import domain_key, rendezvous, site_policy

    ours = domain_key.load()
    site = site_policy.load(ours.folder / site_policy.FILE)
    found, twice = meeting(args).look()
    rows: list[dict[str, Any]] = []
    for name, standing in found.items():
        p, words = standing.signed.proposal, {f"P{n}": a.decision for n, (a, _) in sorted(standing.said.items())}
        judged = site_policy.evaluate(p, site, ours.public, time.time())
        broken = [rule for rule, _ in judged.refused] if ours.public in p.domains else []  # a coordinator only looks
        rows.append({"proposal": name, "name": p.name, "said": words, "approved": standing.approved, "breaks": broken})
        if ours.public in (*p.domains, p.coordinator):  # what strangers put there fills no disk
            rendezvous.keep(standing)
    if args.json:
        common.emit({"proposals": rows, "equivocations": [e.to_json() for e in twice]})
    elif not rows:
        common.say("no proposal lies there; a relay that was started anew has none until it is proposed again")
    else:
        for row, standing in zip(rows, found.values(), strict=True):
            said = ", ".join(f"{who} {word}s" for who, word in row["said"].items()) or "nobody said anything yet"
            state = "approved by all three" if row["approved"] else said
            outside = f"; outside the site policy: {', '.join(row['breaks'])}" if row["breaks"] else ""
            common.show(f"{row['proposal'][:12]}  {standing.signed.proposal.name}  {state}{outside}")
    for e in twice:
        rendezvous.keep_evidence(e)
        who, ids = domain_key.fingerprint(e.coordinator), " and ".join(t.proposal.id[:12] for t in e.texts)
        common.say(f"the coordinator {who} signed two texts as one proposal: {ids}")
    return FAILED if twice else OK
