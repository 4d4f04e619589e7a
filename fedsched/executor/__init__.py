"""Launches: starts, scales, stops and reports a cluster's tasks."""
