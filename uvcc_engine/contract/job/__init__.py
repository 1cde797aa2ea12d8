"""What the workers of a run are to do: their coordinates, links and job."""
