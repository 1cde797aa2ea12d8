"""The run contract: the files of one run directory on one pod. Standard library only."""

from uvcc_engine.contract.writer import RunWriter as RunWriter
from uvcc_engine.contract.writer import Ticker as Ticker
