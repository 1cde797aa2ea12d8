"""Dates in cells, as numbers: days since 1970, month, day of the week. Read strictly, in one order per column."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import date, datetime, time
from typing import Final

ORDERS: Final = ("ymd", "dmy", "mdy")
"""In which order year, month and day stand."""
MONTHS: Final = 12
WEEKDAYS: Final = 7
_SHAPE: Final = re.compile(
    r"(\d{1,4})([-/.])(\d{1,2})\2(\d{1,4})(?:[T ](\d{1,2}):(\d{2})(?::(\d{2})(?:\.\d{1,9})?)?(?:Z|[+-]\d{2}:?\d{2})?)?"
)
_FIRST: Final = date(1970, 1, 1).toordinal()


def looks_like_date(cell: str) -> bool:
    """Whether a cell has the shape of a date, whatever its order."""
    return bool(_SHAPE.fullmatch(cell.strip()))


def date_of(cell: str, order: str) -> datetime | None:
    """The moment that a cell holds, by its own clock; None if it holds none in this order. Two digits make no year."""
    found = _SHAPE.fullmatch(cell.strip())
    if found is None:
        return None
    places = {letter: text for letter, text in zip(order, found.group(1, 3, 4), strict=True)}
    if len(places["y"]) != 4 or max(len(places["m"]), len(places["d"])) > 2:
        return None
    hour, minute, second = (int(text or 0) for text in found.group(5, 6, 7))
    try:
        day = date(int(places["y"]), int(places["m"]), int(places["d"]))
        return datetime.combine(day, time(hour, minute, second))
    except ValueError:
        return None


def days_of(moment: datetime) -> float:
    """Days since 1970, with the part of the day."""
    seconds = moment.hour * 3600 + moment.minute * 60 + moment.second
    return moment.toordinal() - _FIRST + seconds / 86400.0


def order_of(cells: Iterable[str]) -> str:
    """The only order in which all cells are dates; empty if there is none, or more than one."""
    left = list(ORDERS)
    for cell in cells:
        left = [order for order in left if date_of(cell, order) is not None]
    return left[0] if len(left) == 1 else ""
