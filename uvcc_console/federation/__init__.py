"""People of their own: a domain's long-lived key, its site policy, and what it approves."""
