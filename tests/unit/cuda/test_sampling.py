from dataclasses import dataclass, replace

import pytest
import torch

from pdserve.cuda.device import Device
from pdserve.cuda.sampling import SampleSlot, TokenChooser
from pdserve.engine.batch import SequenceSlice
from pdserve.engine.host_sampling import sample_slice
from pdserve.request import BlockId, Request, RequestId, SamplingParams

VOCAB = 48


@dataclass
class Row:
    """A sequence that samples in some row."""

    request: Request
    output_index: int = 0

    def slot(self, row: int) -> SampleSlot:
        part = SequenceSlice(
            request=self.request,
            start=4 + self.output_index,
            token_ids=(1,),
            block_ids=(BlockId(0),),
            output_index=self.output_index,
        )
        return SampleSlot(part=part, row=row)


def make_row(name: str, output_index: int = 0, **over: object) -> Row:
    params = replace(SamplingParams(temperature=0.9, max_tokens=99), **over)  # type: ignore[arg-type]
    return Row(
        Request(
            request_id=RequestId(name),
            token_ids=(1, 2, 3, 4),
            num_prompt_tokens=4,
            sampling=params,
            eos_token_ids=(2, 90),
        ),
        output_index,
    )


@pytest.fixture
def chooser() -> TokenChooser:
    return TokenChooser(Device(torch.device("cpu")), 4, VOCAB)


def check(chooser: TokenChooser, rows: dict[int, Row], numbers: torch.Generator) -> None:
    """Lets all rows sample once and compares with the host's choice."""
    logits = torch.randn(4, VOCAB, generator=numbers) * 2
    known = logits.clone()
    slots = [one.slot(row) for row, one in rows.items()]
    made = chooser.choose(logits, slots).read()
    for slot in slots:
        for name, token in sample_slice(slot.part, known[slot.row]).items():
            assert made[name].token_id == token.token_id
            if token.logprobs is not None:
                found = made[name].logprobs
                assert found is not None
                assert found.logprob == pytest.approx(token.logprobs.logprob, abs=1e-5)
    for one in rows.values():
        one.output_index += 1


def test_rows_that_stay_move_and_change_draw_the_hosts_tokens(chooser: TokenChooser) -> None:
    numbers = torch.Generator().manual_seed(1)
    greedy, drawn = make_row("a", temperature=0.0), make_row("b", seed=5)
    check(chooser, {0: greedy, 1: drawn}, numbers)
    check(chooser, {0: greedy, 1: drawn}, numbers)
    check(chooser, {0: drawn}, numbers)
    check(chooser, {0: drawn, 3: greedy}, numbers)
    check(chooser, {1: drawn, 0: make_row("c", output_index=7, seed=9)}, numbers)
    check(chooser, {0: make_row("b", seed=6), 1: greedy}, numbers)


def test_a_row_that_skips_a_step_goes_on_at_its_own_output_index(chooser: TokenChooser) -> None:
    numbers = torch.Generator().manual_seed(2)
    drawn, other = make_row("a", seed=3), make_row("b", seed=4)
    check(chooser, {0: drawn, 1: other}, numbers)
    check(chooser, {1: other}, numbers)
    check(chooser, {0: drawn, 1: other}, numbers)


def test_stop_ids_cannot_be_chosen_before_min_tokens(chooser: TokenChooser) -> None:
    row = make_row("a", temperature=0.0, min_tokens=1)
    logits = torch.zeros(4, VOCAB)
    logits[0, 2], logits[0, 7] = 9.0, 5.0
    made = chooser.choose(logits.clone(), [row.slot(0)]).read()
    assert made[RequestId("a")].token_id == 7
    row.output_index = 1
    made = chooser.choose(logits.clone(), [row.slot(0)]).read()
    assert made[RequestId("a")].token_id == 2


def test_what_needs_the_host_is_chosen_there_beside_the_others(chooser: TokenChooser) -> None:
    numbers = torch.Generator().manual_seed(4)
    rows = {
        0: make_row("a", n=3, seed=1),
        1: make_row("b", seed=2),
        2: make_row("c", logprobs=3),
        3: make_row("d", temperature=0.0, logit_bias=((5, 40.0),)),
    }
    check(chooser, rows, numbers)
    chosen = chooser.choose(torch.zeros(4, VOCAB), [one.slot(row) for row, one in rows.items()])
    assert [slot.row for slot in chosen.device_slots] == [1]
    assert [slot.row for slot in chosen.host_slots] == [0, 2, 3]


def test_the_chosen_tokens_log_probability_is_the_models_own(chooser: TokenChooser) -> None:
    numbers = torch.Generator().manual_seed(5)
    check(chooser, {0: make_row("a", logprobs=0), 1: make_row("b", seed=8)}, numbers)


def test_a_step_without_samples_chooses_nothing(chooser: TokenChooser) -> None:
    assert chooser.choose(None, []).read() == {}
