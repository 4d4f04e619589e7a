"""`python -m fedsched.aggregator --config FILE`: run one aggregator until a signal ends it."""

from fedsched.config import AggregatorConfig
from fedsched.process import leave, run


def main(config: AggregatorConfig) -> int:
    """Import and run; the import takes seconds, and a wrong file is told before."""
    from fedsched.aggregator import app

    return app.main(config)


if __name__ == "__main__":
    leave(run("aggregator", AggregatorConfig, main))
