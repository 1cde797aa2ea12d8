"""Where a screen gets its picture from, and where its wishes go: journal, recording, the run's own processes."""
