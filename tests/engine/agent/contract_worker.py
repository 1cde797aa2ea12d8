"""A worker of a few lines that keeps the run contract: trains nothing, obeys .HALT, checkpoints, exits.

argv: [steps] [pause between steps in s]
"""

from __future__ import annotations

import sys
import threading
import time

from uvcc_engine.contract import RunWriter
from uvcc_engine.contract.checkpoints import checkpoint


def main() -> int:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    pause = float(sys.argv[2]) if len(sys.argv) > 2 else 0.005
    wait = threading.Event().wait
    with RunWriter.from_env() as w:
        root = w.directory / "checkpoints"
        found = checkpoint.latest_verified(root, run=w.run)
        first = found.step if found else 0
        w.event("party_start", step=first)
        print("started", flush=True)
        for step in range(first, steps):
            asked = w.poll_halt()
            while asked is not None and asked.mode == "hold":
                if w.heartbeat(step, "hold", halt_nonce=asked.nonce):
                    w.event("held", nonce=asked.nonce, step=step)
                wait(0.005)
                asked = w.poll_halt()
            if asked is not None and asked.mode == "halt":
                made = checkpoint.save(
                    root,
                    run=w.run,
                    step=step,
                    rank=w.rank,
                    topology={},
                    contents={checkpoint.rank_file(w.rank): step.to_bytes(8, "little")},
                )
                w.heartbeat(step, "halted", halt_nonce=asked.nonce)
                w.event("halted", nonce=asked.nonce, step=step, checkpoint=made.sha256)
                w.exit("halted", step=step, checkpoint=made.sha256)
                return 0
            w.metrics(step, loss=1.0 / (step + 1), lr=0.1, toks_per_s=0.0)
            w.event("epoch_root", epoch=step, at=time.time())
            w.heartbeat(step, "train")
            wait(pause)
        w.result("ab" * 32, {"loss": 0.5})
        w.exit("done", step=steps)
    print("no newline at the end", end="", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
