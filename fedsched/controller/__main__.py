"""`python -m fedsched.controller --config FILE`: run one controller until a signal ends it."""

import sys

from fedsched.config import ControllerConfig
from fedsched.controller.app import main
from fedsched.process import run

if __name__ == "__main__":
    sys.exit(run("controller", ControllerConfig, main))
