"""Learns: from a teacher's decisions and from what really happened to the jobs."""
