"""Rows of ``bench mpc`` over slower links, by their names: ``mlp_step_20ms_1gbit`` is 20 ms one way at 1 Gbit/s."""

from __future__ import annotations

import math
import re
from typing import Final

from uvcc_engine.contract.machine.link_time import link_time

_LINK: Final = re.compile(r"(?:_(\d+)ms)?(?:_(\d+)([mg])bit)?$")


def link_of(name: str) -> tuple[float, float]:
    """Seconds one way, and bytes a second of each party's line."""
    found = _LINK.search(name)
    delay, many, unit = found.groups() if found else (None, None, None)
    rate = math.inf if many is None else int(many) * (1e6 if unit == "m" else 1e9) / 8
    return int(delay or 0) / 1000.0, rate


def work_of(name: str) -> str:
    """The row without its link."""
    return _LINK.sub("", name)


def passive_floor_s(name: str, rounds: int, bytes_per_party: float) -> float:
    """What the link alone takes: rounds times the delay, and a party's bytes at its rate."""
    delay, rate = link_of(name)
    return link_time(rounds, bytes_per_party, delay, rate).total_s
