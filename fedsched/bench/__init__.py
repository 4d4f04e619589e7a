"""Measures what a running job feels: pauses of resizes against restarts, steps a second against PyTorch's own way."""
