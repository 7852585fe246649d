from pdserve.face.progress import ProgressMonitor
from pdserve.timeline import ManualClock


def test_C9_a_counter_that_stands_still_means_frozen() -> None:
    clock = ManualClock()
    monitor = ProgressMonitor(clock, frozen_after_s=5.0)
    monitor.observe(1, 0.1)
    clock.advance(4.9)
    assert not monitor.is_frozen
    clock.advance(0.2)
    assert monitor.is_frozen


def test_C9_a_heartbeat_without_progress_does_not_help() -> None:
    clock = ManualClock()
    monitor = ProgressMonitor(clock, frozen_after_s=5.0)
    monitor.observe(7, 0.1)
    for _ in range(6):
        clock.advance(1.0)
        monitor.observe(7, 0.1)
    assert monitor.is_frozen


def test_C9_a_slow_step_is_not_frozen_before_four_times_its_prediction() -> None:
    clock = ManualClock()
    monitor = ProgressMonitor(clock, frozen_after_s=5.0)
    monitor.observe(1, 3.0)
    clock.advance(11.0)
    assert not monitor.is_frozen
    clock.advance(1.5)
    assert monitor.is_frozen


def test_C9_an_hour_of_saturation_raises_no_false_alarm() -> None:
    clock = ManualClock()
    monitor = ProgressMonitor(clock, frozen_after_s=5.0)
    for turn in range(3600):
        clock.advance(1.0)
        monitor.observe(turn + 1, 1.0)
        assert not monitor.is_frozen


def test_C9_a_face_that_stood_still_itself_judges_nobody_yet() -> None:
    clock = ManualClock()
    monitor = ProgressMonitor(clock, frozen_after_s=5.0)
    monitor.observe(1, 0.1)
    clock.advance(15.0)
    assert not monitor.look()
    for _ in range(19):
        clock.advance(0.25)
        assert not monitor.look()
    clock.advance(0.5)
    assert monitor.look()


def test_C9_a_face_that_looks_in_time_finds_a_frozen_rank() -> None:
    clock = ManualClock()
    monitor = ProgressMonitor(clock, frozen_after_s=5.0)
    monitor.observe(1, 0.1)
    looks = []
    for _ in range(21):
        clock.advance(0.25)
        looks.append(monitor.look())
    assert looks == [False] * 20 + [True]
