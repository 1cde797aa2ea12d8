"""Widgets that draw a snapshot and post intents."""
