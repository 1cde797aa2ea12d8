"""``python -m uvcc_engine.agent``: see :mod:`uvcc_engine.agent.main`."""

import sys

from uvcc_engine.agent.main import main

if __name__ == "__main__":
    sys.exit(main())
