"""`pdserve router`: one router front."""

import sys

from launcher.roles.entry import run_router
from router.server import run

if __name__ == "__main__":
    sys.exit(run_router(run))
