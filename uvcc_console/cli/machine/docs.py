"""``uvcc docs [TOPIC]``: the manual, in the terminal with a search; as plain text where there is none."""

from __future__ import annotations

import sys

from uvcc_console.cli import common
from uvcc_console.cli.main import FAILED, OK
from uvcc_engine.contract.machine.reading_width import columns_of


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "docs",
        "The manual. TOPIC is a page, an alert, a gate, a verb, or PAGE#SECTION. Without a terminal, or with --plain, "
        "the text is printed.",
    )
    parser.add_argument("topic", nargs="?", default="", metavar="TOPIC", help="where to begin")
    parser.add_argument("--list", action="store_true", help="list the pages")
    parser.add_argument("--search", default="", metavar="WORDS", help="list the sections that hold every word")
    parser.add_argument("--plain", action="store_true", help="print the text, also on a terminal")
    parser.add_json()
    args = parser.parse_args(argv)
    from uvcc_console.cli.screen.launch import has_terminal
    from uvcc_console.report import manual

    known = manual.pages()
    if args.list:
        if args.json:
            common.emit([{"name": p.name, "title": p.title} for p in known])
        else:
            common.show("\n".join(manual.listing(known)))
        return OK
    if args.search:
        found = manual.search(args.search, known)
        if args.json:
            common.emit([{"topic": s.address, "heading": s.heading} for s in found])
        else:
            for part in found:
                common.show(f"{part.address:<44} {part.heading}")
        return OK if found else FAILED
    page, anchor = manual.look_up(args.topic or manual.START, known)
    if args.json:
        text = manual.shown(page, anchor) if anchor else page.text
        common.emit({"name": page.name, "title": page.title, "section": anchor, "text": text})
        return OK
    if has_terminal() and not args.plain:
        from uvcc_console.ui.home.manual_app import ManualApp

        ManualApp(known, f"{page.name}#{anchor}" if anchor else page.name).run()
        return OK
    text = manual.shown(page, anchor) if anchor else page.text
    text = text if columns_of(sys.stdout) is None else manual.joined(text)  # it is broken anew for its reader
    common.show(text.rstrip("\n"))
    return OK
