"""What is wrong in a profile or on this machine, of every provider that comes with UVCC: said before anything is asked
for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from uvcc_console.fleet.provider import PodRequest
from uvcc_console.fleet.provider_kinds import OWN_KINDS, PARTIES_KIND, provider_for
from uvcc_console.plan.profile import parse
from uvcc_engine.contract.errors import ConfigError, UvccError

JOB = {"kind": "private", "model": "mlp-digits", "steps": 2}
# provider -> what its error says where this machine has nothing that it needs: the variable, the file, the program
NEEDS = {
    "local": "",
    "inventory": r"fleet\.hosts",
    "prime": "PRIME_API_KEY.*600",
    "runpod": "RUNPOD_API_KEY.*600",
    "lambda": "LAMBDA_API_KEY.*600",
    "vast": "VAST_API_KEY.*600",
    "slurm": "sinfo|sbatch|squeue|scontrol",
    "kubernetes": r"\.kube/config|KUBECONFIG",
    "skypilot": r"uvcc\[skypilot\]",
}
FIELDS: list[tuple[str, Any, str]] = [
    ("gpus", -1, "fleet.gpus"),
    ("max_price", "cheap", "fleet.max_price"),
    ("wait_for_stock", 721, "fleet.wait_for_stock"),
    ("fallbacks", ["lambda"], "fleet.fallbacks"),
    ("spott", True, "did you mean .*spot"),
]


def test_no_provider_is_missing_here() -> None:
    assert set(NEEDS) == set(OWN_KINDS) - {PARTIES_KIND}


@pytest.mark.parametrize("name", NEEDS)
def test_what_is_missing_is_named_before_anything_is_asked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("PRIME_API_KEY", "UVCC_PRIME_API_KEY", "RUNPOD_API_KEY", "LAMBDA_API_KEY", "VAST_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    for variable in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))

    async def quote() -> None:
        provider = provider_for({"provider": name}, tmp_path)
        try:
            await provider.quote([PodRequest("uvcc-r-p0r0", 0, 0)])
        finally:
            await provider.close()

    if not NEEDS[name]:  # this machine is all it needs
        asyncio.run(quote())
        return
    with pytest.raises(UvccError, match=NEEDS[name]):
        asyncio.run(quote())
    assert not list(tmp_path.glob("*intents*"))  # no create was even thought of


@pytest.mark.parametrize("name", NEEDS)
def test_a_letter_too_many_names_the_provider_that_was_meant(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse({"job": JOB, "fleet": {"provider": f"{name}x"}})
    assert error.value.hint == f"did you mean {name}?"


@pytest.mark.parametrize(("key", "value", "said"), FIELDS)
@pytest.mark.parametrize("name", NEEDS)
def test_a_wrong_value_names_its_key(name: str, key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse({"job": JOB, "fleet": {"provider": name, key: value}})
