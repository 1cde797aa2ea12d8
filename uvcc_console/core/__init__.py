"""Events, the pure reducer, detectors and the journal. No textual, no network."""
