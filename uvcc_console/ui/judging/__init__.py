"""What one frame shows is judged here: health, condition, lamps, filters, rechecks of what was verified."""
