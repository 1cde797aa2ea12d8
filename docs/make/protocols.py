"""What is computed on shares, and by which published protocols: the words of the modules themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from docs.make.words import HEAD

ROOT: Final = Path(__file__).parents[2]
ROOMS: Final = {
    "mpc/foundation": "Secret sharing: what every protocol stands on",
    "mpc/products": "Products and truncations",
    "mpc/comparisons": "Comparisons and selections",
    "mpc/functions": "Functions of models",
    "sealing": "Between owner and parties",
    "proofs": "Proofs",
}
_SHORT: Final = 150


def _told(path: Path) -> str:
    """A module's docstring, if it says more than what is in the file."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.replace("``", "`") if len(text) > _SHORT else ""


def _sections() -> Iterator[str]:
    for room, title in ROOMS.items():
        found = {p: told for p in sorted((ROOT / "uvcc_engine" / room).glob("*.py")) if (told := _told(p))}
        if found:
            yield from (f"## {title}", "")
        for path, told in found.items():
            name = path.parent.name if path.stem == "__init__" else path.stem.replace("_", " ")
            yield from (f"### {name}", "", f"`{path.relative_to(ROOT).as_posix()}`", "", told, "")


def page() -> str:
    """The page."""
    lines = [
        "# The protocols",
        "",
        HEAD,
        "",
        "Three parties compute on replicated shares over the integers modulo 2^64: `x = x0 + x1 + x2`, and party i",
        "holds `x_i` and `x_(i+1)`. One of them may look at all that it sees and learns nothing; see",
        "[what is protected](index.md). Numbers are fixed point. [What a protocol costs](costs.md) counts rounds and",
        "bytes, [rounds of a training step](../rounds.md) what a step says, [benchmarks](../benchmarks.md) how long it",
        "takes.",
        "Where we differ from a paper, [the arguments](arguments.md) say why nothing is told.",
        "",
        "**Preprocessing needs no oblivious transfer here.** Two parties that share secrets additively must",
        "multiply what each alone knows, and take oblivious transfer, VOLE or homomorphic encryption to make random",
        "products ahead. In a replicated sharing each summand of a product has a party that holds both its factors,",
        "so a product needs no such material: only numbers that two parties draw alike from a key that they share",
        "(`prg`), and what the third party, who knows every mask and no masked value, deals for truncations and",
        "comparisons. Both depend on no data. `uvcc-engine bench mpc --split` shows what share of each row they",
        "are, and what a thread gains that draws the next step's numbers beside this one (`drawn ahead`): a worker",
        "has one where its pod has four cores for each worker. What a dealer makes of its numbers is no large part",
        "of a step and stays where the message is built. A GPU draws by ChaCha20, those of the next step on a second",
        "stream beside this one (`drawn beside`).",
        "",
        "What follows is what the modules say of themselves: what each computes, by which published protocol, and why",
        "what it opens reveals nothing.",
        "",
        *_sections(),
    ]
    return "\n".join(lines).rstrip() + "\n"
