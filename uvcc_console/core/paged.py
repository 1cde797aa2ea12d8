"""A frozen mapping of many entries that gives one with an entry more, or with another value, without copying all.

Folding an event of a run makes a new snapshot, and a plain mapping of the workers would be copied whole for every
heartbeat: the work of a step would grow with the square of the workers. Here the values lie in pages, of which one is
copied, beside the list of the pages. The order is that of insertion, as a dict's.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from itertools import chain
from typing import Final, TypeVar

PAGE: Final = 64
K = TypeVar("K")
V = TypeVar("V")


class PagedMapping(Mapping[K, V]):
    """Equal to a dict with the same entries; never changed."""

    __slots__ = ("pages", "places")

    def __init__(self, entries: Mapping[K, V]) -> None:
        """The same entries in the same order."""
        values = list(entries.values())
        self.places: dict[K, int] = {key: i for i, key in enumerate(entries)}
        self.pages: list[list[V]] = [values[i : i + PAGE] for i in range(0, len(values), PAGE)]

    def with_entry(self, key: K, value: V) -> PagedMapping[K, V]:
        """The same with one entry replaced, or new at the end."""
        at = self.places.get(key)
        pages = self.pages.copy()
        made: PagedMapping[K, V] = object.__new__(PagedMapping)
        if at is None:
            at = len(self.places)
            # places are shared by all mappings of the same keys, and only ever copied for a new key
            made.places = {**self.places, key: at}
            if at % PAGE == 0:
                pages.append([])
            pages[-1] = [*pages[-1], value]
        else:
            made.places = self.places
            page = pages[at // PAGE].copy()
            page[at % PAGE] = value
            pages[at // PAGE] = page
        made.pages = pages
        return made

    def __getitem__(self, key: K) -> V:
        at = self.places[key]
        return self.pages[at // PAGE][at % PAGE]

    def __contains__(self, key: object) -> bool:
        return key in self.places

    def __iter__(self) -> Iterator[K]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def values(self) -> ValuesView[V]:
        """In the order of the keys."""
        return _Values(self)

    def items(self) -> ItemsView[K, V]:
        """In the order of the keys."""
        return _Items(self)

    def all_values(self) -> Iterator[V]:
        """Page by page, without asking for every key."""
        return chain.from_iterable(self.pages)

    def __repr__(self) -> str:
        return f"PagedMapping({dict(self)!r})"


class _Values(ValuesView[V]):
    _mapping: PagedMapping[object, V]

    def __iter__(self) -> Iterator[V]:
        return self._mapping.all_values()


class _Items(ItemsView[K, V]):
    _mapping: PagedMapping[K, V]

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return zip(self._mapping, self._mapping.all_values(), strict=True)
