"""Several router fronts and their brain: `pdserve router --fronts N` goes on as this."""

import sys

from launcher.roles.entry import run_router
from launcher.router_group import run_group

if __name__ == "__main__":
    sys.exit(run_router(run_group))
