"""Agreement on a policy, then the phases in which workers train."""
