"""fedsched: federated multi-cluster scheduling of elastic deep-learning training."""

__version__ = "0.1.0"
