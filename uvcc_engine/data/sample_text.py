"""A small text for the small language model: "Jabberwocky" (Lewis Carroll, 1871), in the public domain."""

from __future__ import annotations

from typing import Final

import numpy as np

from uvcc_engine.data.sets import Dataset, Ints, one_hot, split

ALPHABET: Final = " abcdefghijklmnopqrstuvwxyz"
"""Everything else is read as a space."""
JABBERWOCKY: Final = """
Twas brillig, and the slithy toves
Did gyre and gimble in the wabe:
All mimsy were the borogoves,
And the mome raths outgrabe.

Beware the Jabberwock, my son!
The jaws that bite, the claws that catch!
Beware the Jubjub bird, and shun
The frumious Bandersnatch!

He took his vorpal sword in hand;
Long time the manxome foe he sought
So rested he by the Tumtum tree
And stood awhile in thought.

And, as in uffish thought he stood,
The Jabberwock, with eyes of flame,
Came whiffling through the tulgey wood,
And burbled as it came!

One, two! One, two! And through and through
The vorpal blade went snicker-snack!
He left it dead, and with its head
He went galumphing back.

And hast thou slain the Jabberwock?
Come to my arms, my beamish boy!
O frabjous day! Callooh! Callay!
He chortled in his joy.
"""


def tokens(text: str) -> Ints:
    """Letters as numbers ``[length]``: places in the alphabet, runs of other characters being one space."""
    words = "".join(c if c in ALPHABET else " " for c in text.lower()).split()
    return np.array([ALPHABET.index(c) for c in " ".join(words)], dtype=np.int64)


def load_text(seed: int, test_rows: int, positions: int, text: str = JABBERWOCKY, val_rows: int = 0) -> Dataset:
    """Windows of ``positions`` letters, every second one, as one-hot rows; labels (rows, positions): the letters that
    come next. Split by ``seed``; raises ConfigError if the text is too short."""
    found = tokens(text)
    starts = np.arange(0, len(found) - positions, 2)
    windows = found[starts[:, None] + np.arange(positions + 1)]
    x, y = one_hot(windows[:, :-1], len(ALPHABET)), windows[:, 1:]
    return split(x, y, seed, test_rows, len(ALPHABET), val_rows)
