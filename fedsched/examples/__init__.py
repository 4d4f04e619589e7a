"""Training scripts to start from, on data that comes with an installed package."""
