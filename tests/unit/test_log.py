import io
import json
import logging

from pdserve.log import JsonFormatter, safe_id


def _format(message: str, **fields: object) -> str:
    record = logging.makeLogRecord({"name": "pdserve.x", "msg": message, "levelname": "INFO"})
    vars(record).update(fields)
    return JsonFormatter({"front_id": "front-1"}).format(record)


def test_a_line_is_one_json_object_with_its_fields():
    line = json.loads(_format("request finished", request_id="r-1", num_tokens=3, ids=["a"]))
    assert line["message"] == "request finished"
    assert (line["request_id"], line["num_tokens"], line["front_id"]) == ("r-1", 3, "front-1")


def test_E10_control_characters_cannot_forge_a_line():
    text = _format("x", detail='a\r\n{"level":"ERROR"}\x1b[31m')
    assert "\n" not in text
    assert "\x1b" not in text


def test_E10_an_id_is_capped_to_128_safe_characters():
    assert safe_id("a\nb\x1b" + "x" * 1_000_000) == "a_b_" + "x" * 124
    line = json.loads(_format("x", request_id="y" * 5000 + "\n"))
    assert line["request_id"] == "y" * 128


def test_an_exception_stands_inside_the_line():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter({}))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    try:
        raise ValueError("inner")
    except ValueError:
        logger.exception("caught")
    (text,) = stream.getvalue().splitlines()
    assert "ValueError: inner" in json.loads(text)["exception"]
