"""The aggregator process: federated rounds."""
