"""What one machine has: processes, installed parts of the program, short socket paths, speed."""
