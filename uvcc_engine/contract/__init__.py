"""The run contract: the files of one run directory on one pod. Standard library only."""
