"""Whether an image can run what is to run on it, said before anything is rented."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from uvcc_console.fleet.provider_kinds import alternatives, sections
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.machine import torch_floor


def check(image: str, packages: Sequence[str], known: Iterable[str]) -> None:
    """Hold the torch in an image's name to the floor; ``packages`` of the profile may bring another torch.

    Raises ConfigError that names those of the ``known`` images which fit.
    """
    version = torch_floor.version_of_image(image)
    if version is not None and version < torch_floor.LEAST and not torch_floor.brings_torch(packages):
        what = torch_floor.what_is_old(torch_floor.text_of(version))
        raise ConfigError(f"fleet.image is {image}: {what}", torch_floor.install_hint(known))


def check_all(fleet: Mapping[str, Any], known: Mapping[str, Iterable[str]]) -> None:
    """Each image that a ``fleet`` section may rent: of every party and every fallback. ``known``: by provider.

    Raises ConfigError as ``check`` does.
    """
    for own in (one for part in sections(fleet) for one in alternatives(part)):
        check(str(own.get("image", "")), own.get("packages", ()), known.get(str(own.get("provider")), ()))
