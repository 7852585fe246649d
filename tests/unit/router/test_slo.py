import math

import pytest

from pdserve.errors import ConfigError, InvalidField
from router.slo import Slo, parse_slo_classes


def test_a_class_is_found_by_name_and_a_request_may_say_otherwise() -> None:
    classes = parse_slo_classes(["chat=ttft_s:0.5,tpot_s:0.05", "batch=priority:5"])
    assert classes.find("chat") == Slo(ttft_s=0.5, tpot_s=0.05)
    assert classes.find("batch") == Slo(priority=5)
    assert classes.find() == Slo()
    assert classes.find("chat", ttft_s=2.0) == Slo(ttft_s=2.0, tpot_s=0.05)


def test_an_unknown_class_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidField, match="one of: a, b"):
        parse_slo_classes(["b=", "a="]).find("c")
    with pytest.raises(InvalidField, match="none is configured"):
        parse_slo_classes([]).find("c")


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_time_that_is_not_positive_is_refused(value: float) -> None:
    with pytest.raises(InvalidField, match="ttft_slo_s"):
        parse_slo_classes([]).find(ttft_s=value)
    with pytest.raises(InvalidField, match="tpot_slo_s"):
        parse_slo_classes([]).find(tpot_s=value)


@pytest.mark.parametrize(
    "texts",
    [
        ["=ttft_s:1"],
        ["a=ttft_s"],
        ["a=ttft_s:x"],
        ["a=speed:1"],
        ["a=ttft_s:-1"],
        ["a=priority:10"],
        ["a=", "a="],
    ],
)
def test_a_malformed_class_is_named(texts: list[str]) -> None:
    with pytest.raises(ConfigError, match="slo_classes"):
        parse_slo_classes(texts)
