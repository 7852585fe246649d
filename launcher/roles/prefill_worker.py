"""`pdserve prefill-worker`: one prefill replica."""

import sys

from launcher.roles.entry import run_worker
from pdserve.request import Role
from prefill_worker.server import run

if __name__ == "__main__":
    sys.exit(run_worker(Role.PREFILL, run))
