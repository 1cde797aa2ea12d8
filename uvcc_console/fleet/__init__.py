"""Providers, SSH, the agent client and the spend ledger."""
