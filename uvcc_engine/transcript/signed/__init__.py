"""What is signed while a run goes on: statements, opened leaves, records at the relay."""
