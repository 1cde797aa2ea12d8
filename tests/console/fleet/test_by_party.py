"""A provider for each of the three parties, to the rest of the console one: profile, price, failures of one alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from uvcc_console.fleet.by_party import PartyProviders
from uvcc_console.fleet.inventory import jump_to
from uvcc_console.fleet.provider import (
    AsksHosts,
    Books,
    Caps,
    Pod,
    PodRequest,
    Quote,
    QuoteLine,
    Remembers,
    Rents,
    Several,
)
from uvcc_console.fleet.provider_kinds import kind_in, place_of, provider_for, runs_here, section_for, sections
from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import parse
from uvcc_console.runs import sweep
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError

JOB = {"kind": "private", "model": "mlp-digits", "steps": 2}
RUN = "uvcc-x-1-"


class Shelf:
    """A provider in memory that can be told to be out of reach."""

    def __init__(self, name: str, price: float, wallet: float | None = None) -> None:
        self.name, self.price, self.wallet = name, price, wallet
        self.pods: dict[str, Pod] = {}
        self.down = False
        self.caps: Caps | None = None
        self.proved = 0

    def _answer(self) -> None:
        if self.down:
            raise UnreachableError(f"{self.name} does not answer")

    async def quote(self, requests: Sequence[PodRequest]) -> Quote:
        self._answer()
        return Quote(tuple(QuoteLine(r, self.name, "x", self.price) for r in requests), 1.0, wallet=self.wallet)

    async def create(self, request: PodRequest) -> Pod:
        self._answer()
        pod = Pod(request.name, request.party, request.replica, self.name, f"id-{request.name}", price_hr=self.price)
        return self.pods.setdefault(request.name, pod)

    async def wait_ready(self, pod: Pod) -> Pod:
        return pod

    async def delete(self, pod: Pod) -> None:
        self._answer()
        self.pods.pop(pod.name, None)

    async def list(self, prefix: str) -> list[Pod]:
        self._answer()
        return [p for n, p in self.pods.items() if n.startswith(prefix)]

    async def close(self) -> None: ...

    def begun(self, prefix: str) -> set[str]:
        return {n for n in self.pods if n.startswith(prefix)}

    def books(self) -> Books:
        return Books(1.0, 2.0)

    async def prove(self, *, ended: bool, keep: Sequence[str] = ()) -> list[str]:
        self._answer()
        self.proved += 1
        return []


@pytest.fixture
def three() -> tuple[PartyProviders, list[Shelf]]:
    shelves = [Shelf("a", 1.0, 10.0), Shelf("b", 2.0, 4.0), Shelf("c", 3.0)]
    return PartyProviders(shelves, ["P0 a", "P1 b", "P2 c"]), shelves


def requests() -> list[PodRequest]:
    return [PodRequest(f"{RUN}p{p}r{r}", p, r) for r in range(2) for p in range(3)]


async def test_every_call_goes_to_the_party_s_own_provider(three: tuple[PartyProviders, list[Shelf]]) -> None:
    whole, shelves = three
    assert all(isinstance(whole, kind) for kind in (Rents, Remembers, AsksHosts, Several))
    quote = await whole.quote(requests())
    assert (quote.hourly, quote.runway_h) == (12.0, 1.0)
    assert {name: part.hourly for name, part in quote.parts.items()} == {"P0 a": 2.0, "P1 b": 4.0, "P2 c": 6.0}
    pods = [await whole.wait_ready(await whole.create(r)) for r in requests()]
    assert [sorted(place_of(n)[0] for n in s.pods) for s in shelves] == [[0, 0], [1, 1], [2, 2]]
    assert {p.name for p in await whole.list(RUN)} == {r.name for r in requests()} == whole.begun(RUN)
    whole.caps = Caps(5.0, 6.0)
    assert [s.caps for s in shelves] == [Caps(5.0, 6.0)] * 3
    assert whole.books() == Books(1.0, 2.0)
    for pod in pods:
        await whole.delete(pod)
    assert await whole.list(RUN) == []
    assert await whole.prove(ended=True) == []


async def test_one_that_does_not_answer_keeps_no_other(three: tuple[PartyProviders, list[Shelf]]) -> None:
    whole, shelves = three
    for request in requests():
        await whole.create(request)
    shelves[1].down = True
    listed = {p.name: p.doubt for p in await whole.list(RUN)}
    assert {name for name, doubt in listed.items() if doubt} == {f"{RUN}p1r0", f"{RUN}p1r1"}
    assert "P1 b: b does not answer" in listed[f"{RUN}p1r0"]
    with pytest.raises(UnreachableError, match="P1 b"):
        await whole.quote(requests())
    with pytest.raises(UnreachableError, match="P1 b"):
        await whole.prove(ended=True)
    assert [s.proved for s in shelves] == [1, 0, 1]
    shelves[0].pods["uvcc-gone-1-p1r0"] = Pod("uvcc-gone-1-p1r0", 1, 0, "a", "9")  # of another run, at this account
    with pytest.raises(UvccError, match="b does not answer"):
        await sweep.sweep(whole, RUN)
    assert len(shelves[0].pods) == 3  # a run that this data folder does not know is nobody's to judge


async def test_the_sweep_ends_a_pod_where_it_was_listed(
    three: tuple[PartyProviders, list[Shelf]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, shelves = three
    shelves[0].pods["uvcc-gone-1-p1r0"] = Pod("uvcc-gone-1-p1r0", 1, 0, "a", "9")
    monkeypatch.setattr(sweep, "abandoned", lambda name, *, now=None: name.startswith("uvcc-gone-"))
    assert [p.name for p in await sweep.sweep(whole, RUN)] == ["uvcc-gone-1-p1r0"]
    assert shelves[0].pods == {}


def test_a_profile_names_a_provider_per_party(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text("hosts: [{host: a.example, user: me, jump: door.example}]\n")
    parties = {"P0": {"provider": "prime", "gpu": "A", "max_price": 2.0}, "P1": {}, "P2": {"provider": "inventory"}}
    parties["P2"]["hosts"] = str(hosts)
    profile = parse({"job": JOB, "fleet": {"parties": parties, "gpu": "H", "packages": ["torch==2.6"]}})
    plan = make_plan("x-1", "x", profile)
    assert {n: (r.gpu, r.max_price_hr) for n, r in plan.requests.items()} == {
        "p0r0": ("A", 2.0),
        "p1r0": ("H", None),
        "p2r0": ("H", None),
    }
    assert profile.fleet.where == "P0 prime, P1 local, P2 inventory"
    fleet = profile.fleet.model_dump(mode="json", exclude_defaults=True) | {"provider": profile.fleet.provider}
    assert [part["provider"] for part in sections(fleet)] == ["prime", "local", "inventory"]
    assert section_for(fleet, "uvcc-x-1-p1r7xabc234")["party"] == 1
    assert jump_to(fleet, "me@a.example:22") == "door.example"
    assert (runs_here(fleet), kind_in(fleet).consents) == (False, True)
    assert parse({"job": JOB, "fleet": {"parties": {"P0": {}, "P1": {}, "P2": {}}}}).fleet.kind == "local"
    with pytest.raises(ConfigError, match=r"P0 prime: .*API key") as error:
        provider_for(fleet, tmp_path)
    assert "PRIME_API_KEY" in error.value.hint


@pytest.mark.parametrize(
    ("fleet", "what", "hint"),
    [
        ({"parties": {"P0": {}, "P1": {}}}, "fleet.parties.P2 is missing", ""),
        ({"parties": {"P0": {}, "P1": {}, "P2": {}, "P3": {}}}, "unknown key fleet.parties.P3", "P"),
        ({"parties": {"P0": {"gpuu": 1}, "P1": {}, "P2": {}}}, "unknown key fleet.parties.P0.gpuu", "P0.gpu"),
        ({"parties": {"P0": {"provider": "prim"}, "P1": {}, "P2": {}}}, "is 'prim'", "did you mean prime?"),
        ({"provider": "prime", "parties": {"P0": {}, "P1": {}, "P2": {}}}, "leave out fleet.provider", ""),
        ({"parties": {"P0": {"keep_pods": True}, "P1": {}, "P2": {}}}, "keep_pods holds for the whole", ""),
        ({"parties": {"P0": {"provider": "inventory"}, "P1": {}, "P2": {}}}, "needs hosts", ""),
        ({"parties": {"P0": {"provider": "parties"}, "P1": {}, "P2": {}}}, "P0 is 'parties'", "wants one"),
        ({"parties": []}, "fleet.parties", ""),
        ({"parties": {"P0": {"provider": 3}, "P1": {}, "P2": {}}}, "fleet.parties", ""),
    ],
)
def test_what_cannot_be_is_named(fleet: Mapping[str, Any], what: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse({"job": JOB, "fleet": fleet})
    assert what in str(error.value)
    assert hint in error.value.hint


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PRIME_API_KEY", "UVCC_PRIME_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
