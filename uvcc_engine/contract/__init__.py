"""What every side agrees on: a run's files, its job, the words between console and pod. Standard library only.

A trainer of one's own needs :class:`RunWriter` from here, and nothing else of the engine.
"""

from uvcc_engine.contract.run_files.writer import RunWriter as RunWriter
from uvcc_engine.contract.run_files.writer import Ticker as Ticker
