from pathlib import Path

from launcher.gpus import find_gpus, pick_gpu


def test_the_drivers_files_are_counted_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("nvidia10", "nvidia2", "nvidia0", "nvidiactl", "nvidia-uvm", "sda1"):
        (tmp_path / name).touch()
    assert find_gpus(None, tmp_path) == ("0", "2", "10")


def test_what_the_user_made_visible_wins(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    assert find_gpus("3, GPU-8f2a", tmp_path) == ("3", "GPU-8f2a")
    assert find_gpus("", tmp_path) == ()


def test_a_machine_without_a_driver_has_none(tmp_path: Path) -> None:
    assert find_gpus(None, tmp_path) == ()
    assert find_gpus(None, tmp_path / "absent") == ()
    assert pick_gpu((), ()) is None


def test_replicas_go_to_the_gpu_that_the_fewest_have() -> None:
    assert pick_gpu(("0", "1"), ()) == "0"
    assert pick_gpu(("0", "1"), ("0",)) == "1"
    assert pick_gpu(("0", "1"), ("0", "1", "0")) == "1"
    assert pick_gpu(("0", "1"), ("0", "1")) == "0"
