"""``uvcc profiles``: the known profiles as a table; show one, begin one of your own, the schema for your editor."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import Any

from uvcc_console.cli import common
from uvcc_engine.contract.errors import UvccError


def row(name: str) -> dict[str, Any]:
    """What a profile would do: job, pods, cap in dollars, hours at most; or why it cannot be used."""
    from uvcc_console.plan import profile as p
    from uvcc_console.plan.plan import make_plan, new_run_id

    try:
        short, checked = p.load(name)
        plan = make_plan(new_run_id(short, token="0000"), short, checked)
    except UvccError as e:
        return {"error": str(e)}
    limits = checked.limits
    return {
        "job": checked.job.kind,
        "pods": len(plan.requests),
        "provider": checked.fleet.where,
        "cap": limits.total,
        "hours": limits.ttl / 3600,
    }


def _hours(hours: float) -> str:
    """``40 min``, ``1.5 h``."""
    return f"{hours:g} h" if hours >= 1 else f"{60 * hours:.0f} min"


def line(name: str, about: str, found: dict[str, Any]) -> str:
    """One row of the table."""
    if "error" in found:
        return f"{name:<28} cannot be used: {found['error']}"
    cap = f"${found['cap']:g}" if found["cap"] else "nothing"
    return f"{name:<28} {found['job']:<8} {found['pods']:>4}  {cap:>8} {_hours(found['hours']):>7}  {about}"


def fitting(row_text: str, about: str, width: int) -> list[str]:
    """A row in lines of a terminal so wide: what it is about goes below it where there is no room. 0: all on one."""
    if not width or len(row_text) <= width:
        return [row_text]
    beside = row_text.removesuffix(about).rstrip() if about else row_text
    below = textwrap.wrap(about, max(20, width - 5), initial_indent="    ", subsequent_indent="    ")
    return [*textwrap.wrap(beside, max(20, width - 1), subsequent_indent="    "), *below]


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "profiles",
        "List the known profiles, show one, begin one of your own (new NAME --from PROFILE), or print the JSON Schema.",
    )
    parser.add_argument("action", nargs="?", choices=["list", "show", "new", "schema"], default="list")
    parser.add_argument("name", nargs="?", default="", metavar="NAME")
    parser.add_argument("--from", dest="template", default="demo", metavar="PROFILE", help="what a new one begins as")
    parser.add_set()
    parser.add_json()
    args = parser.parse_args(argv)
    from uvcc_console.plan import own_profiles
    from uvcc_console.plan import profile as p

    if args.action == "schema":
        common.emit(own_profiles.schema())
        return 0
    if args.action == "list":
        found = p.available()
        if args.json:
            common.emit([{"name": f.name, "path": str(f.path), "about": f.about, **row(f.name)} for f in found])
            return 0
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        common.show(f"{'profile':<28} {'job':<8} {'pods':>4}  {'cap':>8} {'time':>7}")
        for f in found:
            common.show("\n".join(fitting(line(f.name, f.about, row(f.name)), f.about, width)))
        return 0
    if not args.name:
        parser.error(f"{args.action} wants the name of a profile")
    if args.action == "new":
        made = own_profiles.new(args.name, args.template)
        common.show(f"{made}\nedit it, then: uvcc profiles show {args.name}; uvcc rollout {args.name}")
        return 0
    if args.json or args.set:
        name, checked = p.load(args.name, args.set)
        common.emit({"name": name, **checked.model_dump(mode="json")})
        return 0
    path = p.find(args.name)
    p.load(args.name)
    common.hand_out(path.read_text().rstrip("\n"))
    return 0
