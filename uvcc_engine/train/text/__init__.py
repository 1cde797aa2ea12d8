"""Where a language model's text comes from, how it becomes tokens, and how rows of them are packed and prepared."""
