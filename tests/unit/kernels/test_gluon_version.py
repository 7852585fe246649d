"""The versions of Triton that the streamed kernels are written for."""

import pytest

from pdserve.kernels.gluon_version import has_known_gluon


@pytest.mark.parametrize(
    ("version", "is_known"),
    [("3.6.0", True), ("3.6.1+git1", True), ("3.7.1", False), ("3.5.1", False), ("4.6.0", False)],
)
def test_only_versions_that_were_tried_get_the_streamed_kernels(
    version: str, is_known: bool
) -> None:
    assert has_known_gluon(version) is is_known
