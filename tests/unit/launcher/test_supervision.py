from launcher.supervision import BackOff, LeaseWatch


def test_back_off_doubles_up_to_its_limit() -> None:
    back_off = BackOff(first_s=1.0, longest_s=5.0)
    assert [back_off.next_delay_s(0.0) for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_healthy_life_forgives_earlier_failures() -> None:
    back_off = BackOff(first_s=1.0, healthy_after_s=30.0)
    back_off.next_delay_s(0.0)
    back_off.next_delay_s(0.0)
    assert back_off.next_delay_s(30.0) == 1.0


def test_thousands_of_failures_stay_at_the_limit() -> None:
    back_off = BackOff(longest_s=10.0)
    assert [back_off.next_delay_s(0.0) for _ in range(5000)][-1] == 10.0


def test_C9_registered_replica_is_frozen_after_three_lease_times_of_silence() -> None:
    watch = LeaseWatch(lease_s=3.0, start_timeout_s=60.0, now_s=0.0)
    watch.observe(5.0, is_registered=True)
    watch.observe(14.0, is_registered=False)
    assert not watch.is_frozen(14.0)
    assert watch.is_frozen(14.1)


def test_starting_replica_has_the_start_timeout() -> None:
    watch = LeaseWatch(lease_s=3.0, start_timeout_s=60.0, now_s=0.0)
    watch.observe(59.0, is_registered=False)
    assert not watch.is_frozen(60.0)
    assert watch.is_frozen(60.1)


def test_C18_outage_of_the_registry_freezes_nobody() -> None:
    watch = LeaseWatch(lease_s=3.0, start_timeout_s=60.0, now_s=0.0)
    watch.observe(1.0, is_registered=True)
    watch.observe_outage(300.0)
    assert not watch.is_frozen(309.0)
    assert watch.is_frozen(309.1)


def test_returning_replica_is_healthy_again() -> None:
    watch = LeaseWatch(lease_s=3.0, start_timeout_s=60.0, now_s=0.0)
    watch.observe(1.0, is_registered=True)
    watch.observe(9.0, is_registered=False)
    watch.observe(9.5, is_registered=True)
    assert not watch.is_frozen(18.5)
