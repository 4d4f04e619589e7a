"""Trains the job: what runs inside an elastic job, and the session that a training script uses."""
