"""`pdserve decode-worker`: one decode replica."""

import sys

from decode_worker.server import run
from launcher.roles.entry import run_worker
from pdserve.request import Role

if __name__ == "__main__":
    sys.exit(run_worker(Role.DECODE, run))
