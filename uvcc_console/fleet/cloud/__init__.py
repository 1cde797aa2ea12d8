"""What every provider that rents pods shares: keys of accounts, calls, intents, proofs of absence."""
