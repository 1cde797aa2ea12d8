"""Local arithmetic behind one small interface, one module per device."""
