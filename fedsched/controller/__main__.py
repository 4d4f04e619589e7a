"""`python -m fedsched.controller --config FILE`."""

import argparse
import sys
from pathlib import Path

from fedsched.config import ControllerConfig, load
from fedsched.controller.app import main
from fedsched.errors import FedschedError

parser = argparse.ArgumentParser(prog="fedsched.controller", description="Run a controller.")
parser.add_argument("--config", type=Path, required=True, help="YAML file with a ControllerConfig")
try:
    sys.exit(main(load(ControllerConfig, parser.parse_args().config)))
except FedschedError as problem:
    sys.stderr.write(f"{problem}\n")
    sys.exit(problem.exit_code)
