"""The pages that follow from the code: ``python -m docs.make`` writes them, ``--check`` names those that are stale."""
