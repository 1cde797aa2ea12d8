"""The manual in the terminal: topics at the left, the text at the right, a search above."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Markdown, OptionList, Static
from textual.widgets.option_list import Option

from uvcc_console.report import manual
from uvcc_console.report.manual import ManualPage
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.text import clean

KEYS = "/ search   Enter open   Tab other side   b back   Esc close"


class ManualScreen(ModalScreen[None]):
    """Closes with Esc or q; Esc in the search first takes the search away."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape", "leave", "close"),
        ("q", "dismiss", "close"),
        ("slash", "search", "search"),
        ("b", "back", "back"),
    ]

    def __init__(self, known: Sequence[ManualPage], address: str = manual.START) -> None:
        super().__init__()
        self._known = list(known)
        self._here = ""
        self._trail: list[str] = []
        self._first = address

    def compose(self) -> ComposeResult:
        yield Input(placeholder="/ search the manual", id="manual-search")
        with Horizontal(id="manual-body"):
            yield OptionList(id="manual-topics")
            with VerticalScroll(id="manual-text", can_focus=True):
                yield Markdown(open_links=False)
        yield Static(KEYS, id="manual-keys", markup=False)

    async def on_mount(self) -> None:
        self._list_pages()
        await self.go(self._first)
        self.query_one("#manual-text").focus()

    def _list_pages(self) -> None:
        self._offer([(page.title, page.name) for page in self._known])

    def _offer(self, rows: Sequence[tuple[str, str]]) -> None:
        topics = self.query_one("#manual-topics", OptionList)
        topics.clear_options()
        seen: set[str] = set()
        topics.add_options([Option(clean(t), id=a) for t, a in rows if not (a in seen or seen.add(a))])  # type: ignore[func-returns-value]

    # ---- going somewhere

    async def go(self, address: str, *, back: bool = False) -> None:
        """Show an address of the manual; one that is not known is said."""
        try:
            page, anchor = manual.look_up(address, self._known)
        except UvccError as e:
            self.notify(str(e), severity="warning", markup=False)
            return
        if self._here and not back:
            self._trail.append(self._here)
        self._here = f"{page.name}#{anchor}" if anchor else page.name
        await self.query_one(Markdown).update(manual.shown(page, anchor))
        text = self.query_one("#manual-text", VerticalScroll)
        text.border_title = clean(page.title)
        text.border_subtitle = self._here
        text.scroll_home(animate=False)
        topics = self.query_one("#manual-topics", OptionList)
        for at, option in enumerate(topics.options):
            if option.id in (self._here, page.name):
                topics.highlighted = at
                break

    async def action_back(self) -> None:
        """Show the page that was shown before."""
        if self._trail:
            await self.go(self._trail.pop(), back=True)

    @on(Markdown.LinkClicked)
    async def _follow(self, event: Markdown.LinkClicked) -> None:
        event.stop()
        there = manual.resolve(self._here.partition("#")[0], event.href)
        if ":" in there.partition("/")[0]:
            self.notify(clean(there), title="outside of the manual", markup=False)
        else:
            await self.go(there)

    @on(OptionList.OptionSelected)
    async def _chosen(self, event: OptionList.OptionSelected) -> None:
        await self.go(str(event.option.id))
        self.query_one("#manual-text").focus()

    # ---- searching

    def action_search(self) -> None:
        """Type what to look for."""
        self.query_one(Input).focus()

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        if not event.value.strip():
            self._list_pages()
            return
        found = manual.search(event.value, self._known)
        self._offer([(f"{part.heading} ({part.page.rpartition('/')[2]})", part.address) for part in found])

    @on(Input.Submitted)
    def _searched(self) -> None:
        topics = self.query_one("#manual-topics", OptionList)
        if topics.option_count:
            topics.highlighted = 0
            topics.focus()

    def action_leave(self) -> None:
        """Close the search, or the manual if no search is open."""
        search = self.query_one(Input)
        if search.has_focus or search.value:
            search.value = ""
            self.query_one("#manual-text").focus()
        else:
            self.dismiss(None)
