from pdserve.timeline import PauseWatch


def test_who_looks_in_time_did_not_stand_still() -> None:
    own_pause = PauseWatch(3.0, now_s=10.0)
    assert [own_pause.look(now_s) for now_s in (13.0, 14.0, 17.0)] == [False, False, False]


def test_C19_who_looks_late_stood_still_and_is_told_once() -> None:
    own_pause = PauseWatch(3.0, now_s=10.0)
    assert own_pause.look(13.5)
    assert not own_pause.look(13.6)
