"""The language-model trainer."""
