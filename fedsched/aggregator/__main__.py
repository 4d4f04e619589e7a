"""`python -m fedsched.aggregator --config FILE`: one aggregator process."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedsched import config
from fedsched.errors import FedschedError


def run() -> int:
    """Read the configuration and run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fedsched.aggregator", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML file of an aggregator's configuration")
    try:
        loaded = config.load(config.AggregatorConfig, parser.parse_args().config)
    except FedschedError as problem:
        sys.stderr.write(f"{problem}\n")
        return problem.exit_code
    from fedsched.aggregator.app import main  # Flower and torch take seconds; a wrong file is reported before.

    return main(loaded)


if __name__ == "__main__":
    sys.exit(run())
