"""A worker in the run contract's terms: reaches the step it is told, then obeys the control file.

argv: step, and "ignore" for one that never looks at the control file.
"""

import sys
import threading
from pathlib import Path

from uvcc_engine.contract.checkpoints import checkpoint
from uvcc_engine.contract.run_files.writer import RunWriter

STEP_S = 0.02
step_done = threading.Event()  # never set: a step takes its time
step, obey = int(sys.argv[1]), sys.argv[2:] != ["ignore"]
with RunWriter.from_env() as w:
    while True:
        asked = w.poll_halt() if obey else None
        if asked is not None and asked.mode == "halt":
            break
        held = asked is not None and asked.mode == "hold"
        w.heartbeat(step, "hold" if held else "train", **({"halt_nonce": asked.nonce} if asked and held else {}))
        step_done.wait(STEP_S)
    saved = checkpoint.save(
        Path(w.directory) / "checkpoints",
        run=w.run,
        step=step,
        coord=w.coord,
        topology={},
        contents={"state.bin": b"weights"},
    )
    w.heartbeat(step, "halted", halt_nonce=asked.nonce, checkpoint=saved.sha256)
    w.exit("halted", step=step, checkpoint=saved.sha256)
