"""`pdserve router`: one router front; with `--fronts N` what starts and watches several."""

import os
import sys

from launcher.role_commands import role_command
from launcher.roles.entry import run_router
from pdserve.config.router import RouterConfig
from router import server


def run(config: RouterConfig) -> int:
    """Runs one front in this process, or becomes what runs several."""
    if config.fronts > 1:
        command = role_command("router-group")
        os.execv(command[0], [*command, *sys.argv[1:]])
    return server.run(config)


if __name__ == "__main__":
    sys.exit(run_router(run))
