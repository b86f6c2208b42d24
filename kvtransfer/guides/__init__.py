"""Prefixes with a life of their own: guide files, and the seam between a guide and what follows."""
