"""The brain of several router fronts; see `launcher.router_group`."""

import sys

from launcher.roles.entry import run_router
from router.brain.process import run

if __name__ == "__main__":
    sys.exit(run_router(run))
