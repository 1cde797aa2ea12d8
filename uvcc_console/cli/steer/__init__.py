"""Verbs that change what a run or its pods do."""
