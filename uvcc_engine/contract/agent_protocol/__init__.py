"""What a console and a pod's agent say to each other: JSON lines, and a frozen record for each."""
