"""Panels: each draws one part of a run from a snapshot."""
