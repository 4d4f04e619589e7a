"""Decides: pure state machines, events in and commands out."""
