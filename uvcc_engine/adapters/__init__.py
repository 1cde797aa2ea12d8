"""Trainers of well-known libraries made watchable: each adapter is a few lines over :class:`RunWriter`."""
