"""The agent process: one per cluster."""
