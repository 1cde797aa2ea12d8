"""What follows from what is known of a run: a phase's result, a hold's time, the next rung of a triage. Pure."""
