"""Prefixes with a life of their own: packs, seams, grafts, the exactness ladder, and repair."""
