"""Every environment variable that the code reads or sets, and the page about them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from docs.make.words import HEAD, cell

ROOT: Final = Path(__file__).parents[2]
YOURS: Final[dict[str, str]] = {
    "UVCC_HOME": "the data folder: runs, keys, profiles and settings lie below it",
    "UVCC_PRIME_API_KEY": "the market's API key, where `PRIME_API_KEY` is not set; else a file of mode 600 is read",
    "UVCC_PRIME_HOSTS": "hosts, separated by commas, that a profile's `fleet.base_url` may send your API key to",
    "UVCC_RUNPOD_HOSTS": "the same for the provider `runpod`",
    "UVCC_LAMBDA_HOSTS": "the same for the provider `lambda`",
    "UVCC_VAST_HOSTS": "the same for the provider `vast`",
    "UVCC_PLANE_FAULTS": 'a plan of faults as JSON, like `{"drop": 0.01}`: rehearses a bad network in a whole run',
    "UVCC_MICROBATCHES_IN_FLIGHT": "microbatches of a pipeline that are under way at once, 1 to 62; 8 without it",
    "UVCC_GROUP_TIMEOUT_S": "seconds that a rank waits for its sister ranks, as they meet and in each operation; 300 "
    "without it, or twenty foretold steps of a private training where these take longer",
    "UVCC_GROUP_BACKEND": "`gloo`, or the backend over Unix sockets, for groups of one machine; `sealed`: as if "
    "its pods were on several",
    "UVCC_GROUP_CLEAR": "`accept`: a language model's ranks may meet beyond one machine, where nothing encrypts them",
    "UVCC_GEMM": "the way to a matrix product modulo 2^64: `tiles`, `bytes`, `ifma`, `wide`, `halves`, `floats` or "
    "`torch`",
    "UVCC_THREADS": "on how many threads a worker of a private job computes, 1 to 64; without it all processors but "
    "one that it has to itself, 16 at the most",
    "UVCC_KERNELS": "`triton` takes the kernels for GPUs on processors, in Triton's interpreter: for tests",
    "UVCC_LOOPS": "a folder for the compiled loops; pods on the operator's machine get the installation's",
    "UVCC_STRICT": "`1` raises what a malformed record would only be counted as: for tests",
    "UVCC_SPU_PYTHON": "a Python that has SPU, for `uvcc-engine bench mpc --against spu`",
    "UVCC_MPSPDZ": "the folder of MP-SPDZ, for `uvcc-engine bench mpc --against mpspdz` and `bench epochs`",
}
"""Variables that a user may set; those of ``uvcc config`` come from its own table."""
SET: Final[dict[str, str]] = {
    "UVCC_RUN_DIR": "the run directory, for a command",
    "UVCC_RUN": "the run's id on this pod",
    "UVCC_RANK": "the worker's rank in its pod's run directory",
    "UVCC_COORD": "the worker's coordinate, like `p0r0s0t0`",
    "UVCC_LEAD": "`1` for the worker that writes the files that ranks share",
    "UVCC_ATTEMPT": "how often the run was resumed",
    "UVCC_RESUME": "the checkpoint to go on from; empty at the beginning",
    "UVCC_CODE_TREE": "the hash of the folder that `job.code` uploaded, for a command",
    "UVCC_CODE_COMMIT": "the commit that this folder was at, where git knows one",
    "UVCC_CODE_DIRTY": "`1` where the folder differed from that commit",
    "UVCC_STEPS": "how many steps this phase of a command has",
    "UVCC_PROCESSORS_SHARED_BY": "how many workers compute on a pod's processors, or on those of the machine that all "
    "pods are on",
    "UVCC_WORKER_NICE": "how far a local pod's worker steps back behind the console",
    "UVCC_POD": "the home of a local pod, in every process of it",
    "UVCC_BYTECODE": "the installed engine of a local pod's machine, of which its copy takes what Python has compiled",
    "UVCC_PRELOADED": "the socket of the process that imports torch for the local pods of one machine",
    "UVCC_ROOT": "the folder of a claim on a host of yours, in every process of it",
    "UVCC_IDENTITY_SEED": "the seed of a pod's identity where the run has a `--seed`; taken out of sight at once",
    "UVCC_BENCH": "the folder of a benchmark, in every process that it starts",
}
"""Variables that UVCC sets for the processes that it starts."""
_NAME: Final = re.compile(r"UVCC_[A-Z0-9_]*[A-Z0-9]")
_NO_VARIABLE: Final = re.compile(r".*_V\d$|UVCC_SEEDED_.*")  # prefixes of hashes and seeds


def in_code() -> set[str]:
    """Every name in the sources that looks like a variable of ours and is no prefix of a hash."""
    sources = [p for package in ("uvcc_engine", "uvcc_console") for p in (ROOT / package).rglob("*.py")]
    found = {name for path in sources for name in _NAME.findall(path.read_text(encoding="utf-8"))}
    return {name for name in found if not _NO_VARIABLE.fullmatch(name)}


def _table(rows: dict[str, str]) -> Iterator[str]:
    yield from ("| variable | means |", "|---|---|")
    for name in sorted(rows):
        yield f"| `{name}` | {cell(rows[name])} |"
    yield ""


def page() -> str:
    """The page."""
    from uvcc_console.core.settings import KNOWN
    from uvcc_engine.train import env

    settings = {k.variable: f"{k.about} (`{k.key}` of `config.yaml`)" for k in KNOWN}
    lines = ["# Environment variables", "", HEAD, "", "## What you may set", ""]
    lines += _table(YOURS | settings)
    lines += [
        "The market's own `PRIME_API_KEY`, `PRIME_TEAM_ID`, `PRIME_API_BASE_URL` and `PRIME_BASE_URL` are read, too;"
    ]
    lines += ["`NO_COLOR`, `COLORTERM`, `TERM`, `TMUX` and `COLUMNS` mean to it what they mean to other programs.", ""]
    lines += ["## What a worker or a command finds", ""]
    lines += _table(SET)
    lines += [
        "## What the language model's trainer reads",
        "",
        "A profile sets these in `env`. A name that begins with `NSA_` and is not here is refused: nothing is ignored.",
        "",
    ]
    lines += _table({name: meaning for name, (meaning, _) in env.KNOWN.items()})
    lines += ["Passed on to the libraries below, and shown in `run.json`:", ""]
    lines += _table({name + ("..." if name.endswith("_") else ""): said for name, said in env.PASSED_ON.items()})
    return "\n".join(lines).rstrip() + "\n"
