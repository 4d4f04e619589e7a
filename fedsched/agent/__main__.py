"""`python -m fedsched.agent --config FILE`: run one cluster's agent until a signal ends it."""

import sys

from fedsched.agent.app import main
from fedsched.config import AgentConfig
from fedsched.process import run

if __name__ == "__main__":
    sys.exit(run("agent", AgentConfig, main))
