"""Scenarios and what came of them, readable line by line."""
