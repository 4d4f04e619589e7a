"""The loop, the journal and the codec."""
