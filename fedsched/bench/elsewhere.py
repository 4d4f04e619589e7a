"""A parameter server on a machine of its own, as it believes: the one that the command line names."""

from __future__ import annotations

import os
import sys

from fedsched.elastic import ending, server

if __name__ == "__main__":
    os.environ["FEDSCHED_MACHINE"] = sys.argv[1]
    ending.run(server.main)
