"""Guides for engines that serve models: which one a request may have, and how it gets there.

Above guides, whose packs it opens, and beside evaluation. Of each engine one file knows.
"""
