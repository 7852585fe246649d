"""Which Triton the Gluon kernels are written for: that dialect changes from version to version."""

import triton

KNOWN_VERSIONS = ((3, 6),)


def has_known_gluon(version: str = triton.__version__) -> bool:
    """Says whether the streamed kernels compile with a version of Triton."""
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) in KNOWN_VERSIONS
