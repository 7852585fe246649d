"""How kernels are launched: warps, and overlap with the kernel before.

With programmatic dependent launch a kernel may start while the one before it drains. Every kernel
of such a chain says at once that its successor may start, fetches what no kernel writes (weights,
tables), and waits before it touches anything else; so each wait covers all kernels before.
"""


def launch_options(num_warps: int, *, use_pdl: bool) -> dict[str, int | bool]:
    """Returns the launch keywords; the interpreter knows nothing of dependent launches."""
    return {"num_warps": num_warps, "launch_pdl": True} if use_pdl else {"num_warps": num_warps}
