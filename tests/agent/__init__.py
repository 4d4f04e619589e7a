"""The parts of the agent, each against a real or memory store."""
