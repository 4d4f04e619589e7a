"""Answers: observation to decision."""
