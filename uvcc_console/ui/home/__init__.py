"""The start screen: runs, profiles, and the way from a profile to a rollout."""
