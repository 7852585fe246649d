"""Which token follows each row: chosen on the device, or on the host where that cannot be.

Ids stay on the device for the step behind and are copied to the host besides.

Letters: R rows that sample, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.cuda.device import Device
from pdserve.cuda.tensor_ranks import VocabularyShare
from pdserve.engine.batch import SequenceSlice, is_chosen_on_device
from pdserve.engine.host_sampling import sample_slice
from pdserve.kernels.sampling import sample_rows
from pdserve.kernels.sampling_state import DeviceSampling, RowKind
from pdserve.kernels.shared_choice import (
    FOUND_WORDS,
    choose_in_share,
    count_chunks,
    join_shares,
)
from pdserve.request import Request, RequestId, SampledToken, TokenLogprobs
from pdserve.sampler import SamplingRow


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSlot:
    """A slice that samples, and its row of logits."""

    part: SequenceSlice
    row: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenTokens:
    """Tokens on their way to the host; read them once the step has ended."""

    ids_R: Tensor
    logprobs_R: Tensor
    device_slots: Sequence[SampleSlot]
    host_slots: Sequence[SampleSlot]
    host_logits_RV: Tensor | None

    def read(self) -> dict[RequestId, SampledToken]:
        """Returns the tokens of all samples; draws those that the host chooses."""
        ids = self.ids_R.tolist()
        sampled: dict[RequestId, SampledToken] = {}
        for slot in self.device_slots:
            request, token_id = slot.part.request, ids[slot.row]
            logprobs = None
            if request.sampling.logprobs is not None:
                logprob = float(self.logprobs_R[slot.row])
                logprobs = TokenLogprobs(token_id=token_id, logprob=logprob)
            sampled[request.request_id] = SampledToken(token_id=token_id, logprobs=logprobs)
        for index, slot in enumerate(self.host_slots):
            assert self.host_logits_RV is not None
            sampled |= sample_slice(slot.part, self.host_logits_RV[index])
        return sampled


class TokenChooser:
    """The sampling parameters of rows on the device, and the launch of their choice."""

    def __init__(
        self,
        device: Device,
        max_rows: int,
        vocab_size: int,
        share: VocabularyShare | None = None,
        max_in_flight: int = 2,
    ) -> None:
        """Allocates; rows are greedy until they are written.

        Args:
            device: that computes.
            max_rows: at a time.
            vocab_size: of the model.
            share: what this rank has logits of; None is everything.
            max_in_flight: steps whose tokens may wait to be read.
        """
        self._device = device
        self._share = share
        self._found = None if share is None else _Found(device, max_rows, share)
        self._use_pdl = device.has_dependent_launch
        self.ids = device.zeros((max_rows,), torch.int32)
        """What the last step sampled, by row."""
        self._logprobs = device.zeros((max_rows,), torch.float32)
        self._state = DeviceSampling(max_rows, vocab_size, device.torch_device)
        self._known: list[tuple[Request | None, int]] = [(None, 0)] * max_rows
        """Of each row that is not greedy: its request, and the output index that it stands at."""
        # One is written while steps in flight wait to be read.
        turns = range(max_in_flight + 1)
        self._host_ids = [device.pinned((max_rows,), torch.int32) for _ in turns]
        self._host_logprobs = [device.pinned((max_rows,), torch.float32) for _ in turns]
        self._turn = 0

    def choose(self, logits_RV: Tensor | None, slots: Sequence[SampleSlot]) -> ChosenTokens:
        """Launches the choice of all slots' tokens.

        Args:
            logits_RV: of this rank's share of the vocabulary; may be overwritten by the next step;
                None if there is no slot.
            slots: each in a row of its own.
        """
        on_device: list[SampleSlot] = []
        on_host: list[SampleSlot] = []
        for slot in slots:
            (on_device if is_chosen_on_device(slot.part.request) else on_host).append(slot)
        self._turn = (self._turn + 1) % len(self._host_ids)
        ids, logprobs = self._host_ids[self._turn], self._host_logprobs[self._turn]
        host_logits = None
        if logits_RV is not None and on_host:
            host_logits = self._copy_rows(logits_RV, [slot.row for slot in on_host])
        if logits_RV is not None and on_device:
            self._choose_here(logits_RV, on_device, ids, logprobs)
        return ChosenTokens(
            ids_R=ids,
            logprobs_R=logprobs,
            device_slots=on_device,
            host_slots=on_host,
            host_logits_RV=host_logits,
        )

    def _choose_here(
        self, logits_RV: Tensor, slots: Sequence[SampleSlot], ids_R: Tensor, logprobs_R: Tensor
    ) -> None:
        num_rows = max(slot.row for slot in slots) + 1
        self._state.write(self._changed(slots))
        self._mask_stop_ids(logits_RV, slots)
        has_logprobs = any(slot.part.request.sampling.logprobs is not None for slot in slots)
        logits = logits_RV[:num_rows]
        ids, logprobs = self.ids[:num_rows], self._logprobs[:num_rows] if has_logprobs else None
        if self._found is not None and self._state.kind_of(num_rows) != RowKind.FILTERED:
            self._found.choose(logits, self._state, ids, logprobs)
        else:
            if self._share is not None:
                logits = self._share.gather(logits)
            sample_rows(logits, self._state, ids, logprobs, use_pdl=self._use_pdl)
        self._count_up(num_rows)
        ids_R[:num_rows].copy_(self.ids[:num_rows], non_blocking=True)
        if has_logprobs:
            logprobs_R[:num_rows].copy_(self._logprobs[:num_rows], non_blocking=True)

    def _changed(self, slots: Sequence[SampleSlot]) -> dict[int, SamplingRow]:
        """Notes what rows are sampled with from now on, and returns what the device lacks."""
        changed: dict[int, SamplingRow] = {}
        for slot in slots:
            request, index = slot.part.request, slot.part.output_index
            assert index is not None
            known, expected = self._known[slot.row]
            if request.sampling.temperature == 0:
                if known is None:
                    continue
                self._known[slot.row] = (None, 0)
            elif known is request and expected == index:
                continue
            else:
                self._known[slot.row] = (request, index)
            changed[slot.row] = SamplingRow(
                params=request.sampling, output_index=index, sample_index=request.sample_index
            )
        return changed

    def _count_up(self, num_rows: int) -> None:
        """The device has counted up every row of the launch, used or not."""
        known = self._known
        for row in range(num_rows):
            request, index = known[row]
            if request is not None:
                known[row] = (request, index + 1)

    def _mask_stop_ids(self, logits_RV: Tensor, slots: Sequence[SampleSlot]) -> None:
        rows: list[int] = []
        ids: list[int] = []
        first = 0 if self._share is None else self._share.token_ids.start
        for slot in slots:
            request, index = slot.part.request, slot.part.output_index
            assert index is not None
            if index < request.sampling.min_tokens:
                known = (one - first for one in request.stop_ids)
                inside = [one for one in known if 0 <= one < logits_RV.shape[1]]
                rows += [slot.row] * len(inside)
                ids += inside
        if rows:
            at = torch.tensor([rows, ids]).to(logits_RV.device, non_blocking=True)
            logits_RV.index_put_((at[0], at[1]), torch.tensor(-torch.inf, device=at.device))

    def _copy_rows(self, logits_RV: Tensor, rows: Sequence[int]) -> Tensor | None:
        """Copies rows to the host that chooses, which is rank 0's."""
        at = torch.tensor(rows).to(logits_RV.device, non_blocking=True)
        chosen = logits_RV.index_select(0, at)
        if self._share is not None:
            chosen = self._share.gather(chosen)
            if self._share.ranks.rank > 0:
                return None
        host = torch.empty(chosen.shape, dtype=torch.float32, pin_memory=self._device.is_cuda)
        return host.copy_(chosen, non_blocking=True)


class _Found:
    """The exchange of what ranks found in their shares of the vocabulary."""

    def __init__(self, device: Device, max_rows: int, share: VocabularyShare) -> None:
        """Allocates for as many chunks as the largest share has."""
        self._share = share
        self._use_pdl = device.has_dependent_launch
        num_chunks = count_chunks(share.max_tokens)
        shape = (max_rows, num_chunks, FOUND_WORDS)
        self._own = device.zeros(shape, torch.int32)
        shape = (max_rows, share.ranks.size * num_chunks, FOUND_WORDS)
        self._all = device.zeros(shape, torch.int32)

    def choose(
        self, logits_RN: Tensor, rows: DeviceSampling, ids_R: Tensor, logprobs_R: Tensor | None
    ) -> None:
        """Chooses tokens of rows without filters."""
        num_rows = logits_RN.shape[0]
        own, found = self._own[:num_rows], self._all[:num_rows]
        choose_in_share(
            logits_RN,
            rows,
            own,
            first_id=self._share.token_ids.start,
            has_logprobs=logprobs_R is not None,
            use_pdl=self._use_pdl,
        )
        self._share.ranks.gather(own.flatten(1), found.flatten(1))
        join_shares(found, rows, ids_R, logprobs_R, use_pdl=self._use_pdl)
