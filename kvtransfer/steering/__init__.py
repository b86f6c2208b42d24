"""Deliberate edits to a cache."""
