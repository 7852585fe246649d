from router.traffic import TrafficMeter


def test_all_of_a_prompt_counts_before_anything_is_known_of_caches() -> None:
    meter = TrafficMeter()
    meter.note_arrival(100)
    assert (meter.num_arrived, meter.uncached_tokens) == (1, 100)


def test_A12_cached_share_of_those_that_ended_is_taken_off_those_that_come() -> None:
    meter = TrafficMeter()
    for _ in range(200):
        meter.note_end(100, 80)
    meter.note_arrival(1000)
    assert 195 <= meter.uncached_tokens <= 205


def test_counts_never_fall() -> None:
    meter = TrafficMeter()
    seen = []
    for number in range(50):
        meter.note_arrival(10)
        meter.note_end(10, 10 if number % 2 else 0)
        seen.append(meter.uncached_tokens)
    assert seen == sorted(seen)
