"""The choice of tokens under load: the same rows, launch after launch, give the same tokens."""

import pytest
import torch

from pdserve.kernels.sampling import sample_rows
from pdserve.kernels.sampling_state import DeviceSampling
from pdserve.request import SamplingParams
from pdserve.sampler import SamplingRow, sample

NUM_ROWS, VOCAB, NUM_LAUNCHES = 256, 128256, 200


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, top_p=0.95),
        SamplingParams(temperature=3.0, top_p=0.9),
        SamplingParams(temperature=3.0, top_k=4000, top_p=0.9),
    ],
)
def test_rows_that_need_the_whole_vocabulary_get_the_same_tokens_every_time(
    params: SamplingParams,
) -> None:
    device = torch.device("cuda")
    use_pdl = torch.cuda.get_device_capability() >= (9, 0)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(NUM_ROWS, VOCAB, generator=generator) * 2.5
    logits[:, :: VOCAB // 40] += torch.linspace(3, 12, logits[0, :: VOCAB // 40].shape[0])
    logits = logits.bfloat16().float()
    on_device = logits.to(device)
    rows = DeviceSampling(NUM_ROWS, VOCAB, device)
    written = {
        index: SamplingRow(params=params, output_index=index % 7) for index in range(NUM_ROWS)
    }
    rows.write(written)
    fields = rows.fields.clone()
    seen = torch.full((NUM_LAUNCHES, NUM_ROWS), -7, dtype=torch.int32, device=device)
    torch.cuda.synchronize()
    for ids in seen:
        rows.fields.copy_(fields)
        sample_rows(on_device, rows, ids, None, use_pdl=use_pdl)
    torch.cuda.synchronize()
    assert bool((seen == seen[0]).all())
    for index in range(0, NUM_ROWS, 16):
        assert int(seen[0, index]) == sample(logits[index], written[index]).token_id
