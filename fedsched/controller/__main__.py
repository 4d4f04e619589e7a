"""`python -m fedsched.controller --config FILE`: run one controller until a signal ends it."""

from fedsched.config import ControllerConfig
from fedsched.controller.app import main
from fedsched.process import leave, run

if __name__ == "__main__":
    leave(run("controller", ControllerConfig, main))
