"""`pdserve router`: one router front."""

import sys

from router.server import run

from launcher.roles.entry import run_router

if __name__ == "__main__":
    sys.exit(run_router(run))
