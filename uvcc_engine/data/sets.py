"""Data sets, splits and batch order: the public, deterministic side of the data. NumPy only, no network.

Everything here that is random comes from SHAKE-256 over the job's public seed, so that any party (and any later
version of NumPy) draws the same order. Which rows meet in which batch is public; what the rows hold is not.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from uvcc_engine.contract.errors import ConfigError, UnreadableError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Labels = NDArray[np.int64] | NDArray[np.float64]

DIGITS_FILE: Final = Path(__file__).parent / "shipped" / "digits.npz"
DIGITS_ROWS: Final = 1797
DIGITS_TEST: Final = 360


TRAIN, TEST, VALIDATION = 0, 1, 2
"""The sides of a split."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Rows of features and class labels, already split.

    ``train_x`` (n, d) and ``test_x`` (m, d) hold features as the network sees them; the labels are class indices,
    one per row or one per position of every row. Of one class they are numbers to be fitted, one per row; of none there
    are no labels (n, 0). ``val_x`` and
    ``val_y``: rows for validation, None where there are none. ``weights`` (n,): what each training row counts in the
    loss; None where all count the same.
    """

    train_x: Floats
    train_y: Labels
    test_x: Floats
    test_y: Labels
    classes: int
    val_x: Floats | None = None
    val_y: Labels | None = None
    weights: Floats | None = None

    @property
    def parts(self) -> dict[str, tuple[Floats, Labels]]:
        """Features and labels of each part that there is: ``train``, ``test``, ``val``."""
        found = {"train": (self.train_x, self.train_y), "test": (self.test_x, self.test_y)}
        if self.val_x is not None and self.val_y is not None:
            found["val"] = (self.val_x, self.val_y)
        return found

    @classmethod
    def of_sides(cls, x: Floats, y: Labels, side: Ints, classes: int, weights: Floats | None = None) -> Dataset:
        """Rows put where ``side [rows]`` says: ``TRAIN``, ``TEST`` or ``VALIDATION``. ``weights``: of every row."""
        held = side == VALIDATION
        val_x, val_y = (x[held], y[held]) if held.any() else (None, None)
        own = None if weights is None else weights[side == TRAIN]
        return cls(x[side == TRAIN], y[side == TRAIN], x[side == TEST], y[side == TEST], classes, val_x, val_y, own)

    def __post_init__(self) -> None:
        for part, (x, y) in self.parts.items():
            if x.ndim != 2 or y.ndim not in (1, 2) or len(x) != len(y):
                raise ConfigError(
                    f"{part} rows do not fit: features {x.shape}, labels {y.shape}",
                    "features are (rows, columns), labels (rows,) or (rows, positions)",
                )
            if self.classes == 0:
                if y.size:
                    raise ConfigError(f"{part} rows have labels of no class", "leave them out, or name the classes")
            elif self.classes == 1:
                if not np.isfinite(y).all():
                    raise ConfigError(f"{part} targets hold a value that is not finite", "clean the data")
            elif len(y) and (int(y.min()) < 0 or int(y.max()) >= self.classes):
                raise ConfigError(f"{part} labels are not all in 0..{self.classes - 1}", "check the label column")
        if self.weights is not None and self.weights.shape != (len(self.train_x),):
            raise ConfigError(
                f"{len(self.train_x)} training rows and weights of shape {self.weights.shape}", "give each row one"
            )


def public_stream(label: str, seed: int, counter: int, words: int) -> NDArray[np.uint64]:
    """``[words]`` public pseudo-random 64-bit words, bound to (label, seed, counter)."""
    material = f"UVCC_PUBLIC_STREAM_V1|{label}|{seed}|{counter}".encode()
    return np.frombuffer(hashlib.shake_256(material).digest(8 * words), dtype="<u8").astype(np.uint64)


def permutation(label: str, seed: int, counter: int, n: int) -> Ints:
    """A permutation ``[n]`` of ``range(n)``: a stable sort of the public stream's words."""
    return np.argsort(public_stream(label, seed, counter, n), kind="stable").astype(np.int64)


def batch_rows(seed: int, step: int, batch: int, rows: int) -> Ints:
    """Row numbers of training step ``step`` (from 0): consecutive slices of endlessly reshuffled passes.

    Shape (batch,). A batch may span two passes, so every step has exactly ``batch`` rows.
    """
    first, last = step * batch, (step + 1) * batch
    passes = range(first // rows, (last - 1) // rows + 1)
    order = np.concatenate([permutation("batch", seed, k, rows) for k in passes])
    start = first - passes.start * rows
    return order[start : start + batch]


def load_digits(seed: int, test_rows: int = DIGITS_TEST, val_rows: int = 0) -> Dataset:
    """The 1,797 UCI digits (Alpaydin and Kaynak, 1998), split by ``seed``.

    Grey levels 0..16 become (level - 5) / 8: a fixed public map that centres the data and is exact in fixed point.
    Raises UnreadableError if the packaged file is damaged.
    """
    try:
        with np.load(DIGITS_FILE, allow_pickle=False) as found:
            images, labels = found["images"], found["labels"]
    except (OSError, ValueError, KeyError) as error:
        raise UnreadableError(f"the packaged digits cannot be read: {error}", "install the package again") from error
    if images.shape != (DIGITS_ROWS, 64) or labels.shape != (DIGITS_ROWS,):
        raise UnreadableError(f"the packaged digits have shape {images.shape}", "install the package again")
    return split((images.astype(np.float64) - 5.0) / 8.0, labels.astype(np.int64), seed, test_rows, 10, val_rows)


def split(
    x: Floats,
    y: Labels,
    seed: int,
    test_rows: int,
    classes: int,
    val_rows: int = 0,
    weights: Floats | None = None,
) -> Dataset:
    """Split rows by a public permutation of the seed: its first ``test_rows`` are the test set, the next ``val_rows``
    are for validation. ``weights``: of every row.

    Raises ConfigError unless rows are left for all.
    """
    check_split(len(x), test_rows, val_rows)
    order = permutation("split", seed, 0, len(x))
    test, val, train = order[:test_rows], order[test_rows : test_rows + val_rows], order[test_rows + val_rows :]
    val_x, val_y = (x[val], y[val]) if val_rows else (None, None)
    own = None if weights is None else weights[train]
    return Dataset(x[train], y[train], x[test], y[test], classes, val_x, val_y, own)


def check_split(rows: int, test_rows: int, val_rows: int) -> None:
    """Refuse (ConfigError) to hold out so many rows that none is left, or none for the test."""
    if test_rows > 0 and test_rows + val_rows < rows:
        return
    held = f"test_rows is {test_rows}" + (f" and val_rows {val_rows}" if val_rows else "")
    raise ConfigError(f"{held} of {rows} rows", "leave rows for training and for the test")


def target_rows(labels: Labels, classes: int) -> Floats:
    """What a job shares of the labels: one-hot rows of classes, or the numbers themselves, (rows, 1). (rows, 0) where
    there are none."""
    if classes == 0:
        return np.zeros((len(labels), 0))
    if classes == 1:
        return labels.astype(np.float64).reshape(len(labels), -1)
    return one_hot(labels.astype(np.int64), classes)


def one_hot(labels: Ints, classes: int) -> Floats:
    """Labels (n,) or (n, positions) to rows (n, positions * classes) of 0.0 and 1.0."""
    return np.eye(classes, dtype=np.float64)[labels].reshape(len(labels), -1)
