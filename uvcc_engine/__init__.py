"""UVCC engine: the side that runs on pods. It never imports ``uvcc_console``."""

__version__ = "0.1.0"
