"""How the compiled loops come to be: compiled once per installation, kept on disk, loaded before a process forks."""
