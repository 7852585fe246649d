from launcher.client import Generation
from launcher.demo_view import StreamPrinter, timeline_table
from pdserve.rpc.v1 import types_pb2


def test_streams_are_printed_in_whole_words_under_their_labels() -> None:
    lines: list[str] = []
    printer = StreamPrinter(lines.append)
    words = [f"word{number}" for number in range(30)]
    for word in words:
        printer.add("a", word + " ")
        printer.add("b", "x")
    printer.end("a")
    printer.end("b")
    labelled = [line.split(" | ") for line in lines]
    text_of_a = [text for label, text in labelled if label.strip() == "a"]
    assert " ".join(text_of_a).split() == words
    assert all(len(text) <= 60 for text in text_of_a)
    assert [text for label, text in labelled if label.strip() == "b"] == ["x" * 30]


def test_word_longer_than_a_line_is_cut_and_nothing_is_lost() -> None:
    lines: list[str] = []
    printer = StreamPrinter(lines.append)
    printer.add("a", "y" * 150)
    printer.end("a")
    assert "".join(line.split(" | ")[1] for line in lines) == "y" * 150


def test_newlines_do_not_break_the_layout() -> None:
    lines: list[str] = []
    printer = StreamPrinter(lines.append)
    printer.add("a", "one\ntwo\n")
    printer.end("a")
    assert [line.split(" | ")[1] for line in lines] == ["one two"]


def test_stream_without_text_prints_nothing() -> None:
    lines: list[str] = []
    StreamPrinter(lines.append).end("a")
    assert lines == []


def test_table_has_a_column_per_request_and_a_row_per_figure() -> None:
    timeline = types_pb2.Timeline(ttft_s=0.1234, prefill_worker="prefill-0", decode_worker="d")
    table = timeline_table([("a", Generation(timeline=timeline)), ("b", Generation())])
    assert [column.header for column in table.columns] == ["", "a", "b"]
    cells = zip(*(column.cells for column in table.columns), strict=True)
    rows = {name: (first, second) for name, first, second in cells}
    assert rows["TTFT ms"] == ("123", "0")
    assert rows["prefill worker"] == ("prefill-0", "none")
    assert rows["decode worker"] == ("d", "none")
