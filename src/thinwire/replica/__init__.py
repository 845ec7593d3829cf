"""A model in training: attach() and what it returns."""
