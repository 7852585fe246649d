from kv_transfer.computing import ComputedKv


def test_tokens_are_expected_from_the_first_step_that_completes_them() -> None:
    kv = ComputedKv()
    assert kv.num_expected == 0
    kv.launch(64, 7)
    kv.launch(100, 8)
    assert kv.num_expected == 100
    assert [kv.step_for(tokens) for tokens in (1, 64, 65, 100)] == [7, 7, 8, 8]
    kv.end(64)
    assert [kv.step_for(tokens) for tokens in (64, 65)] == [None, 8]
    kv.end(100)
    assert kv.num_expected == 100
    assert kv.step_for(100) is None


def test_what_ended_stays_there_whatever_is_told_again() -> None:
    kv = ComputedKv()
    kv.end(50)
    kv.end(30)
    assert kv.num_expected == 50
    assert kv.step_for(50) is None
