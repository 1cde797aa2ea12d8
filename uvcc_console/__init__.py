"""UVCC console: the operator's side. It never imports torch; only ``ui`` imports textual."""
