"""`python -m fedsched.agent --config FILE`: run one cluster's agent until a signal ends it."""

import sys

from fedsched.config import AgentConfig
from fedsched.process import run


def main(config: AgentConfig) -> int:
    """Import and run; the import takes seconds, and a wrong file is told before."""
    from fedsched.agent import app

    return app.main(config)


if __name__ == "__main__":
    sys.exit(run("agent", AgentConfig, main))
