"""The only door to transformers: load, read specs and caches, rotate, run on a prefix."""
