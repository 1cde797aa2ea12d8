"""``uvcc profiles [show NAME]``: the known profiles, or one of them as it would be used."""

from __future__ import annotations

from uvcc_console.cli import common


def run(argv: list[str]) -> int:
    parser = common.Parser("profiles", "List known profiles, or print one.")
    parser.add_argument("action", nargs="?", choices=["list", "show"], default="list")
    parser.add_argument("name", nargs="?", default="", metavar="NAME")
    parser.add_set()
    parser.add_json()
    args = parser.parse_args(argv)
    from uvcc_console.plan import profile as p

    if args.action == "list":
        found = p.available()
        if args.json:
            common.emit([{"name": f.name, "path": str(f.path), "about": f.about} for f in found])
            return 0
        for f in found:
            common.show(f"{f.name:<28} {f.about}")
        return 0
    if not args.name:
        parser.error("show wants the name of a profile")
    if args.json or args.set:
        name, checked = p.load(args.name, args.set)
        common.emit({"name": name, **checked.model_dump(mode="json")})
        return 0
    path = p.find(args.name)
    p.load(args.name)
    common.show(path.read_text().rstrip("\n"))
    return 0
