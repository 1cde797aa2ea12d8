"""Evidence comes home and is checked before anything is believed."""
