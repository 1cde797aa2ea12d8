"""The agent's side towards its consoles: connections, commands, the files that they follow."""
