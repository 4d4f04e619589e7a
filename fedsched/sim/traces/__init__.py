"""Traces of jobs: importers, the normal form, and how a job of a trace becomes one of a simulation."""
