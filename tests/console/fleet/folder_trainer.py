"""A trainer of a folder of its own: what git ignores is not there, a neighbouring module and artifacts are."""

from __future__ import annotations

FOLDERS_TRAINER = """
import os
from pathlib import Path
import helper
from uvcc_engine.contract import RunWriter

def save():
    return None

assert not Path("data.bin").exists() and not Path(".env").exists(), "what git ignores, and a secret, stay at home"
Path("out").mkdir(exist_ok=True)
with RunWriter.from_env() as run:
    for step in range(1, int(os.environ["UVCC_STEPS"]) + 1):
        helper.work()
        run.step(step, loss=1 / step, save=save)
    Path("out/model.txt").write_text(f"{helper.WORD} {step}")
"""
