"""What the parties agreed to: policy, operation, migration from another job, the record of a committed checkpoint."""
