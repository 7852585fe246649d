from io import StringIO

import pytest
from rich.console import Console

from autoscaler.figures import PoolNumbers
from launcher.commands.demo_autoscale import Load, View
from pdserve.request import Role


def draw(view: View, numbers: dict[Role, PoolNumbers]) -> str:
    text = StringIO()
    console = Console(file=text, width=120)
    with Load("127.0.0.1:1") as load:
        console.print(view.draw(numbers, load))
    return text.getvalue()


@pytest.mark.parametrize("role", Role)
def test_a_pool_is_drawn_once_there_are_figures_of_it(role: Role) -> None:
    assert role not in draw(View(), {})
    drawn = draw(View(), {role: PoolNumbers(num_serving=2, num_starting=1, num_draining=1)})
    (line,) = [line for line in drawn.splitlines() if "##+-" in line]
    assert role in line


def test_a_decision_stands_below_the_table() -> None:
    view = View()
    view.note_decision("prefill: grow 1 -> 2: waiting tokens")
    assert "prefill: grow 1 -> 2: waiting tokens" in draw(view, {})
    assert (view.num_grown, view.num_shrunk) == (1, 0)
