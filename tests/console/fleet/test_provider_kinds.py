"""A provider from outside: one file and an entry point; nothing of the console names it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from uvcc_console.fleet import provider_kinds
from uvcc_console.fleet.provider_kinds import kind_of, provider_for, runs_here
from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import parse
from uvcc_console.plan.schema import profile_model
from uvcc_engine.contract.errors import ConfigError

PACKAGE = '''
import time
from uvcc_console.fleet.provider_kinds import FleetSettings, ProviderKind
from uvcc_console.fleet.provider import Pod, Quote, QuoteLine


class Shelf(FleetSettings):
    """``rack``: where the machines stand."""

    rack: str = "a"


class Provider:
    name = "shelf"

    def __init__(self, fleet):
        self.rack = fleet.get("rack", "a")

    async def quote(self, requests):
        return Quote(tuple(QuoteLine(r, self.name, self.rack, 0.5) for r in requests), time.time())

    async def create(self, request):
        return Pod(request.name, request.party, request.replica, self.name, "1")

    async def wait_ready(self, pod):
        return pod

    async def delete(self, pod):
        pass

    async def list(self, prefix):
        return []

    async def close(self):
        pass


KIND = ProviderKind("shelf", Shelf, lambda fleet, run_dir, ttl_s: Provider(fleet))
WRONG = ProviderKind("other", Shelf, lambda fleet, run_dir, ttl_s: Provider(fleet))
'''
JOB = {"kind": "private", "model": "mlp-digits", "steps": 2}


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """An installed package with a provider; the test may offer more."""
    (tmp_path / "uvcc_shelf.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    points = [EntryPoint("shelf", "uvcc_shelf:KIND", provider_kinds.GROUP)]
    monkeypatch.setattr(provider_kinds, "entry_points", lambda group: points)
    clear()
    yield points
    clear()
    sys.modules.pop("uvcc_shelf", None)


def clear() -> None:
    provider_kinds.known.cache_clear()
    profile_model.cache_clear()


async def test_it_is_planned_priced_and_made_like_one_of_our_own(offered: Sequence[EntryPoint], tmp_path: Path) -> None:
    profile = parse({"job": JOB, "fleet": {"provider": "shelf", "rack": "b"}})
    plan = make_plan("x-1", "x", profile)
    fleet = profile.fleet.model_dump(mode="json")
    provider = provider_for(fleet, tmp_path)
    quote = await provider.quote(plan.requests)
    assert (quote.lines[0].region, quote.hourly) == ("b", 1.5)
    assert not runs_here(fleet)
    assert kind_of("shelf").consents


@pytest.mark.parametrize(
    ("fleet", "what", "hint"),
    [
        ({"provider": "shelf", "rak": "b"}, "unknown key fleet.rak", "rack"),
        ({"provider": "shelf", "rack": 3}, "fleet.rack is 3", "text"),
        ({"provider": "shelf", "base_url": "x"}, "unknown key fleet.base_url", ""),
        ({"provider": "shel"}, "fleet.provider is 'shel'", "did you mean shelf?"),
        ({"provider": "local", "rack": "b"}, "unknown key fleet.rack", ""),
        ({"provider": "prime", "hosts": "b"}, "unknown key fleet.hosts", ""),
    ],
)
def test_each_kind_checks_its_own_keys(
    offered: Sequence[EntryPoint], fleet: Mapping[str, Any], what: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as error:
        parse({"job": JOB, "fleet": fleet})
    assert what in error.value.what
    assert hint in error.value.hint


def test_nobody_may_stand_in_for_a_provider_that_gets_a_key(offered: list[EntryPoint]) -> None:
    offered.append(EntryPoint("prime", "uvcc_shelf:KIND", provider_kinds.GROUP))
    with pytest.raises(ConfigError, match="offers a provider 'prime', which is taken"):
        kind_of("prime")


@pytest.mark.parametrize("target", ["uvcc_shelf:WRONG", "uvcc_shelf:NONE", "no_such_package:KIND"])
def test_a_package_that_is_broken_is_named(offered: list[EntryPoint], target: str) -> None:
    offered[:] = [EntryPoint("shelf", target, provider_kinds.GROUP)]
    with pytest.raises(ConfigError, match=target.partition(":")[0]):
        kind_of("shelf")
    assert not runs_here({"provider": "shelf"})
