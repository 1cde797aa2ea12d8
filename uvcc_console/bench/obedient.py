"""A worker of the halt benchmark: steps of a tenth of a second, and it obeys. Runs on the pod, as a file."""

from __future__ import annotations

import time
from pathlib import Path

from uvcc_engine.contract.checkpoints import checkpoint
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.writer import RunWriter

STEP_S = 0.1


def main() -> None:
    """Train nothing, hold, release, and halt with a checkpoint of a mebibyte."""
    step = 0
    with RunWriter.from_env() as w:
        while True:
            asked = w.poll_halt()
            if asked is not None and asked.mode == "halt":
                break
            if asked is not None and asked.mode == "hold":
                w.heartbeat(step, "hold", halt_nonce=asked.nonce)
                time.sleep(0.05)
                continue
            time.sleep(STEP_S)
            step += 1
            w.heartbeat(step, "train")
        saved = checkpoint.save(
            Path(w.directory) / files.CHECKPOINTS,
            run=w.run,
            step=step,
            coord=w.coord,
            topology={},
            contents={"state.bin": bytes(1 << 20)},
        )
        w.heartbeat(step, "halted", halt_nonce=asked.nonce, checkpoint=saved.sha256)
        w.exit("halted", step=step, checkpoint=saved.sha256)


if __name__ == "__main__":
    main()
