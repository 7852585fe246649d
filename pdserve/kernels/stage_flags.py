"""Flags between the GPUs of a pipeline: one raises its peer's, which waits for that on the device.

    sender:    copy data to the peer, raise the peer's flag to the step's number
    receiver:  wait until the own flag is as high, read the data

A flag lies in the memory of whoever waits for it and only ever rises. Waiting ends after
`max_polls`: then it has failed for good, every later wait ends at once, and the host is told.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["number"])
def raise_flag_kernel(flag_ptr, number):
    """Whoever sees the flag sees all that was written before."""
    tl.atomic_xchg(flag_ptr, number, sem="release", scope="sys")


@triton.jit(do_not_specialize=["number", "max_polls"])
def await_flag_kernel(flag_ptr, number, failed_ptr, max_polls):
    """One program polls memory of its own device."""
    max_polls = tl.where(tl.load(failed_ptr) > 0, 0, max_polls)
    seen = tl.load(flag_ptr, volatile=True)
    num_polls = 0
    while (seen < number) & (num_polls < max_polls):
        seen = tl.load(flag_ptr, volatile=True)
        num_polls += 1
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    if seen < number:
        tl.store(failed_ptr, 1)


def raise_flag(flag: Tensor, number: int) -> None:
    """Tells a peer that everything up to a step is there, once all work so far is done.

    Args:
        flag: int32 [1], in the peer's memory.
        number: of the step, above all before.
    """
    raise_flag_kernel[(1,)](flag, number, num_warps=1)


def await_flag(flag: Tensor, number: int, failed: Tensor, max_polls: int) -> None:
    """Lets later work on the stream wait for a step's data.

    Args:
        flag: int32 [1], in memory of this device.
        number: of the step.
        failed: int32 [1], set to 1 where the flag did not rise in time.
        max_polls: about half a microsecond each.
    """
    await_flag_kernel[(1,)](flag, number, failed, max_polls, num_warps=1)
