"""Pretends: virtual edges around the same core and loop."""
