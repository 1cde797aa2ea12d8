"""A folder of PNG files in one folder per class, as rows: each file is bounded before a pixel of it is unpacked."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.machine import extras
from uvcc_engine.data.sets import Floats, Ints

MOST_FILES: Final = 1 << 18
MOST_SIDE: Final = 1024
MOST_NUMBERS: Final = 1 << 29
_CHANNELS: Final = {"L": 1, "RGB": 3}
_HALF: Final = 127.5


def read_images(folder: Path) -> tuple[Floats, Ints]:
    """Pixels (n, channels * height * width), channel by channel, from -1 to 1, and the classes (n,): the folders' names
    in order. Raises UnreadableError or ConfigError naming the file."""
    extras.require("PIL", f"the images of {folder.name} are read with it")
    classes = sorted(p for p in _entries(folder) if p.is_dir() and not p.is_symlink())
    if len(classes) < 2:
        raise ConfigError(f"{folder} has {len(classes)} folders", "put each class's images into a folder of their own")
    files = [(path, at) for at, one in enumerate(classes) for path in sorted(_entries(one)) if _is_image(path)]
    if not files or len(files) > MOST_FILES:
        raise ConfigError(f"{folder} has {len(files)} PNG files in its folders", f"give 1 to {MOST_FILES}")
    first, mode = _pixels(files[0][0])
    if first.size * len(files) > MOST_NUMBERS:
        raise ConfigError(f"{len(files)} images of {first.size} pixels are too many", "make them smaller")
    rows = np.zeros((len(files), first.size))
    for at, (path, _) in enumerate(files):
        found, its = _pixels(path)
        if (found.shape, its) != (first.shape, mode):
            raise ConfigError(
                f"{path} is {its} of {found.shape[1:]}, {files[0][0].name} is {mode} of {first.shape[1:]}",
                "make all images of one size, and all grey or all RGB",
            )
        rows[at] = found.reshape(-1) / _HALF - 1.0
    return rows, np.array([at for _, at in files], dtype=np.int64)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise UnreadableError(f"cannot read {folder}: {error.strerror}", "check the path") from error


def _is_image(path: Path) -> bool:
    return path.suffix.lower() == ".png" and path.is_file() and not path.is_symlink()


def _pixels(path: Path) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.uint8]], str]:
    """(channels, height, width) of grey levels or colours, and which of them."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with Image.open(path, formats=["PNG"]) as image:  # reads the header alone
                if max(image.size) > MOST_SIDE or image.mode not in _CHANNELS:
                    raise ConfigError(
                        f"{path} is {image.mode} of {image.size}",
                        f"give grey or RGB ones of up to {MOST_SIDE} pixels",
                    )
                found = np.asarray(image)
                mode = image.mode
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError, Warning) as error:
        raise UnreadableError(f"cannot read {path}: {str(error)[:80]}", "save it as PNG again") from error
    return found.reshape(*found.shape[:2], -1).transpose(2, 0, 1), mode
