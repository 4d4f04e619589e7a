"""`python -m fedsched.agent --config FILE`: run one cluster's agent until a signal ends it."""

from fedsched.config import AgentConfig
from fedsched.process import leave, run


def main(config: AgentConfig) -> int:
    """Import and run; the import takes seconds, and a wrong file is told before."""
    from fedsched.agent import app

    return app.main(config)


if __name__ == "__main__":
    leave(run("agent", AgentConfig, main))
