"""Repeats: the loop, its ports, its journal, and the store's layout."""
