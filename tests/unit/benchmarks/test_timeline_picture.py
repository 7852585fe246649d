from benchmarks.timeline_picture import draw, make_bars

SPANS = (
    {"process": "prefill-0-rank", "name": "pack", "frame": 3, "start_ms": 20.0, "end_ms": 20.5},
    {"process": "prefill-0-rank", "name": "pack", "frame": 4, "start_ms": 20.5, "end_ms": 21.0},
    {
        "process": "prefill-0-rank",
        "name": "posted",
        "event": "frame sent",
        "frame": 3,
        "on_link_us": 400,
        "start_ms": 40.4,
        "end_ms": 40.4,
    },
    *(
        {
            "process": "decode-0-rank",
            "name": "posted",
            "event": "frame landed",
            "frame": frame,
            "start_ms": at,
            "end_ms": at,
        }
        for frame, at in ((3, 40.5), (4, 41.0))
    ),
)


def test_a_frame_is_on_its_link_from_when_its_layers_were_computed() -> None:
    bars = [bar for bar in make_bars((47.0, 52.0), SPANS) if bar.lane == "link: frames"]
    assert [(bar.label, bar.start_ms, bar.end_ms) for bar in bars] == [
        ("3", 40.0, 40.5),
        ("4", 20.5, 41.0),
    ]
    assert "link: frames" in draw("one request", (47.0, 52.0), SPANS)
