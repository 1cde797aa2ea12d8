"""torchrun for the ranks of one host: a signal that they obeyed by a halt ends it as it ends one rank alone, with 0.

``python -m uvcc_engine.train.launched DIRECTORY RANKS``, then torchrun's own arguments. By itself torchrun ends every
signal with a traceback and 1, and kills ranks that take more than 30 s for the step and the checkpoint.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Final

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException

from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.contract.run_files import files

PATIENCE_S: Final = 900
"""How long ranks have for their halt; whoever does not want to wait presses ctrl-c again, which they obey at once."""


def main(argv: list[str]) -> int:
    """Be torchrun until its ranks have ended."""
    directory, ranks, *asked = argv
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(PATIENCE_S))
    began = time.time()
    try:
        run.main(asked)
    except SignalException as error:
        if all(_halted(Path(directory), rank, began) for rank in range(int(ranks))):
            return 0
        print(f"error: a signal ended the ranks before all of them had halted: {error}", file=sys.stderr)
        print(f"hint: uvcc-engine train --resume {directory} goes on from the last checkpoint there", file=sys.stderr)
        return 128 + int(error.sigval)
    return 0


def _halted(directory: Path, rank: int, since: float) -> bool:
    """Whether a rank of this start ended by a halt."""
    path = directory / files.exit_name(rank, lead=rank == 0)
    try:
        return path.stat().st_mtime >= since and files.read_json(path).get("status") == "halted"
    except (OSError, UnreadableError):
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
