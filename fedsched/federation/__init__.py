"""Combines the clusters' updates."""
