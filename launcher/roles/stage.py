"""`pdserve stage`: one pipeline stage of a worker, on another node than its face."""

import sys

from launcher.roles.entry import run_stage
from pdserve.stage.main import hold_stage

if __name__ == "__main__":
    sys.exit(run_stage(hold_stage))
