"""The oldest torch: said once, and every place that a pod's torch passes holds to it."""

from __future__ import annotations

import pytest

from uvcc_console.fleet.prime.offers import IMAGES
from uvcc_console.plan import images
from uvcc_console.plan.profile import available, load
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.machine import torch_floor as floor


@pytest.mark.parametrize(
    ("text", "version"),
    [("2.13.0+cpu", (2, 13)), ("2.4.1", (2, 4)), ("3.0a0", (3, 0)), ("", None), ("unknown", None), ("9" * 99, None)],
)
def test_versions_are_read_or_not_judged(text: str, version: tuple[int, int] | None) -> None:
    assert floor.version_of(text) == version
    assert floor.is_old(text) is (version is not None and version < floor.LEAST)


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("cuda_12_4_pytorch_2_4", (2, 4)),
        ("cuda_12_6_pytorch_2_13", (2, 13)),
        ("pytorch/pytorch:2.6.0-cuda12.4", None),
        ("nvcr.io/x-torch2.8", (2, 8)),
        ("ubuntu_22_cuda_12", None),
    ],
)
def test_an_image_says_its_torch_in_its_name(image: str, version: tuple[int, int] | None) -> None:
    assert floor.version_of_image(image) in (version, (2, 6))
    assert floor.image_is_old(image) is (version == (2, 4))


def test_the_wheel_fits_the_driver() -> None:
    assert floor.wheel_for() == floor.wheel_for("580.65.06") == "torch>=2.5"
    assert floor.wheel_for("550.90.07") == "torch>=2.5,<2.11"  # later ones are built for CUDA 13
    with pytest.raises(ConfigError, match=r"driver 470\.57 of the GPUs"):
        floor.wheel_for("470.57")
    with pytest.raises(ConfigError, match="driver"):
        floor.wheel_for("no number")


def test_a_package_that_brings_torch_is_known_by_its_name() -> None:
    assert floor.brings_torch(["tiktoken", "Torch==2.7.0"])
    assert not floor.brings_torch(["torchvision", "pytorch-lightning>=2"])


def test_an_old_image_is_refused_with_those_that_fit_unless_a_package_brings_a_newer_torch() -> None:
    with pytest.raises(ConfigError, match=r"pytorch_2_4: torch 2\.4 is too old") as refused:
        images.check("cuda_12_4_pytorch_2_4", ["tiktoken"], IMAGES)
    assert "fleet.image: cuda_12_6_pytorch_2_7" in refused.value.hint
    with pytest.raises(ConfigError) as refused:
        images.check("my_torch_2_3", (), ())
    assert "fleet.packages: ['torch>=2.5']" in refused.value.hint
    images.check("cuda_12_4_pytorch_2_4", ["torch>=2.6,<2.11"], IMAGES)
    images.check("ubuntu_22_cuda_12", (), IMAGES)


@pytest.mark.parametrize("name", [p.name for p in available()])
def test_no_shipped_profile_names_an_image_whose_torch_is_too_old(name: str) -> None:
    fleet = load(name)[1].fleet
    images.check(fleet.image, (), IMAGES)


def test_no_image_that_is_chosen_by_itself_has_too_old_a_torch() -> None:
    assert not [image for image in IMAGES if floor.image_is_old(image)]


def test_every_party_s_image_and_every_fallback_s_is_held_to_it() -> None:
    old, fine = {"provider": "prime", "image": "cuda_12_4_pytorch_2_4"}, {"provider": "prime", "gpu": "H100_80GB"}
    images.check_all({"parties": {"P0": fine, "P1": fine, "P2": fine}}, {"prime": IMAGES})
    with pytest.raises(ConfigError, match="cuda_12_4_pytorch_2_4") as error:
        images.check_all({"parties": {"P0": fine, "P1": old, "P2": fine}}, {"prime": IMAGES})
    assert "pytorch" in error.value.hint  # the market's own images that fit
    with pytest.raises(ConfigError, match="cuda_12_4_pytorch_2_4"):
        images.check_all({"provider": "runpod", "fallbacks": [old]}, {"prime": IMAGES})
