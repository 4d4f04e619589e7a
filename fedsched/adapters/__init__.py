"""Touches: one outside thing per file."""
