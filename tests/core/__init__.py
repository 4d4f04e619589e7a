"""The core: events in, commands out."""
