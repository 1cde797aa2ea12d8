"""The manual's pages: found by topic or by words. They are the files of ``docs``, which are also the site.

A long page is read section by section: what its headings of the second level divide.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.parsing.suggest import CLOSE, nearest

START: Final = "index"
LONG: Final = 90
_ORDER: Final = ("index", "tutorials/", "runbooks/", "reference/", "specifications/", "security/", "architecture")
_BEGINS: Final = re.compile(r"\s*([-*+>|#<]|\d+\. |:::|!!!)|\s{4}")  # a line that goes on with none before it
_ENDS: Final = re.compile(r"\s*([|#<]|```|:::|!!!)|\s{4}")  # one with which none goes on
_COMMENT: Final = re.compile(r"^<!--.*?-->\n+", re.MULTILINE | re.DOTALL)
_DRAWN: Final = re.compile(r"^::: (\S+)\n(?: {4}.*\n|\n(?= {4}))*", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ManualPage:
    """A page: its name below the manual's folder without ``.md``, its title and its text."""

    name: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class ManualSection:
    """A part of a page, from one heading of the second level to the next; ``anchor`` is empty for what comes first."""

    page: str
    heading: str
    anchor: str
    text: str

    @property
    def address(self) -> str:
        """``page``, or ``page#anchor``."""
        return f"{self.page}#{self.anchor}" if self.anchor else self.page


def folder() -> Path:
    """Where the pages lie: a checkout's, else an installation's. Raises UnreadableError."""
    for found in (Path(__file__).resolve().parents[2] / "docs", Path(sys.prefix) / "share" / "uvcc" / "docs"):
        if (found / f"{START}.md").is_file():
            return found
    raise UnreadableError("the manual's pages are not installed", "install the package again, from its wheel")


def pages(where: Path | None = None) -> list[ManualPage]:
    """Every page, in reading order. Raises UnreadableError."""
    where = where or folder()
    found = []
    for path in where.rglob("*.md"):
        name = path.relative_to(where).with_suffix("").as_posix()
        try:
            text = _COMMENT.sub("", path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as e:
            raise UnreadableError(f"cannot read the manual's page {name}: {e}") from e
        text = _DRAWN.sub(r"`\1`: see its docstring, `python -m pydoc \1`.\n", text)
        title = next((line[2:].strip() for line in text.split("\n") if line.startswith("# ")), name)
        found.append(ManualPage(name, title, text))
    return sorted(found, key=lambda p: (_place(p.name), not p.name.endswith(START), p.name))


def _place(name: str) -> int:
    return next((n for n, start in enumerate(_ORDER) if name.startswith(start)), len(_ORDER))


def anchor_of(heading: str) -> str:
    """The anchor that the site gives a heading."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-")


def sections(page: ManualPage) -> list[ManualSection]:
    """The page's parts, in order; what stands before the first heading of the second level is the first."""
    out: list[ManualSection] = []
    heading, anchor, lines, fenced = page.title, "", list[str](), False
    for line in page.text.split("\n"):
        fenced ^= line.startswith(("```", "~~~"))
        if line.startswith("## ") and not fenced:
            out.append(ManualSection(page.name, heading, anchor, "\n".join(lines).strip() + "\n"))
            heading, lines = line[3:].strip().replace("`", ""), []
            anchor = anchor_of(heading)
        lines.append(line)
    return [*out, ManualSection(page.name, heading, anchor, "\n".join(lines).strip() + "\n")]


def look_up(topic: str, known: Sequence[ManualPage]) -> tuple[ManualPage, str]:
    """The page of a topic and the anchor of its section, "" for the page itself.

    A topic is a page's name or the end of it, an address like ``runbooks/alerts#loss_nan``, or a heading: an alert, a
    verb, a gate, a key of the console's manual. Raises ConfigError naming the nearest topic.
    """
    word, _, anchor = topic.strip().lower().replace(".md", "", 1).partition("#")
    for page in known:
        if word in (page.name.lower(), page.name.lower().rpartition("/")[2], page.title.lower()):
            if not anchor or any(s.anchor == anchor_of(anchor) for s in sections(page)):
                return page, anchor_of(anchor)
            raise ConfigError(f"{page.name} has no section {anchor!r}", f"see: uvcc docs {page.name}")
    wanted = anchor_of(word)
    for page in known:
        for part in sections(page):
            if part.anchor and part.anchor in (wanted, f"uvcc-{wanted}"):
                return page, part.anchor
    headings = [part.heading for page in known for part in sections(page)]
    near = nearest(word, [*(p.name.rpartition("/")[2] for p in known), *headings], CLOSE)
    hint = f"did you mean {near}? " if near else ""
    raise ConfigError(f"the manual has nothing named {topic[:60]!r}", f"{hint}see: uvcc docs --list")


def knows(topic: str, known: Sequence[ManualPage]) -> bool:
    """Whether the manual has such a topic."""
    try:
        look_up(topic, known)
    except ConfigError:
        return False
    return True


def search(words: str, known: Sequence[ManualPage], most: int = 60) -> list[ManualSection]:
    """At most ``most`` sections that hold every word; those whose heading does come first."""
    wanted = words.lower().split()
    if not wanted:
        return []
    found: list[tuple[int, ManualSection]] = []
    for page in known:
        for part in sections(page):
            heading, text = f"{page.title} {part.heading}".lower(), part.text.lower()
            if all(w in heading or w in text for w in wanted):
                found.append((sum(w not in part.heading.lower() for w in wanted), part))
    return [part for _, part in sorted(found, key=lambda f: f[0])][:most]


def shown(page: ManualPage, anchor: str = "") -> str:
    """What a reader sees of an address: a section, a short page, or the beginning of a long one and its sections."""
    parts = sections(page)
    if anchor:
        return next((part.text for part in parts if part.anchor == anchor), page.text)
    if page.text.count("\n") <= LONG or len(parts) < 4:
        return page.text
    listed = " · ".join(f"[{part.heading}](#{part.anchor})" for part in parts[1:])
    return f"{parts[0].text}\n{listed}\n"


def joined(text: str) -> str:
    """Each paragraph and entry of a list in one line, for whoever breaks lines at another width than the source."""
    found: list[str] = []
    code = False
    for line in text.split("\n"):
        fence = line.lstrip().startswith("```")
        apart = code or fence or not line.strip() or _BEGINS.match(line) or not found or not found[-1].strip()
        code ^= fence
        if apart or _ENDS.match(found[-1]):
            found.append(line)
        else:
            found[-1] = f"{found[-1]} {line.strip()}"
    return "\n".join(found)


def resolve(here: str, link: str) -> str:
    """The address that a link on page ``here`` leads to; the link itself where it leads out of the manual."""
    if re.match(r"[a-z]+:", link):
        return link
    name, _, anchor = link.partition("#")
    if not name:
        return f"{here}#{anchor}"
    steps: list[str] = here.split("/")[:-1]
    for step in name.split("/"):
        steps = steps[:-1] if step == ".." else [*steps, step]
    there = "/".join(steps).removesuffix(".md")
    return f"{there}#{anchor}" if anchor else there


def listing(known: Sequence[ManualPage]) -> Iterator[str]:
    """A line for each page."""
    width = max((len(p.name) for p in known), default=0)
    for page in known:
        yield f"{page.name:<{width}}  {page.title}"
