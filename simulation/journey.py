"""One request's way through a simulated cluster."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.request import Request, RequestId, SamplingParams
from router.placer import PlaceQuery
from router.worker_key import WorkerKey
from simulation.piece_chain import PieceChain, PromptChains
from simulation.record import Outcome, Record
from simulation.shape import ClusterShape
from simulation.workload import Arrival

_FIRST_OUTPUT_CONTENT = 2**31


@dataclass(slots=True, eq=False)
class Journey:
    """A request at the router."""

    arrival: Arrival
    request: Request
    """The present attempt."""
    token: int
    """What its output consists of."""
    chain: PieceChain | None = None
    """Of the prompt; workers get copies."""
    granules: Sequence[int] = ()
    prefill: WorkerKey | None = None
    decode: WorkerKey | None = None
    is_admitted: bool = False
    is_placed: bool = False
    is_waiting: bool = True
    """As admission counts it: no worker has begun with it."""
    tried: set[WorkerKey] = field(default_factory=set)
    """Decode workers that refused it since it was computed."""
    first_s: float | None = None
    last_s: float | None = None
    second_s: float | None = None
    cached_tokens: int = 0
    """Found in the prefix cache where the prompt was computed first."""
    outcome: Outcome = Outcome.UNFINISHED

    @property
    def request_id(self) -> RequestId:
        """Of all attempts."""
        return self.request.request_id

    def query(self, shape: ClusterShape, now_s: float) -> PlaceQuery:
        """Returns what the router is asked for its present attempt."""
        request, ttft_slo_s = self.request, shape.ttft_slo_s
        if self.first_s is not None or request.attempt > 1:
            # The first token came, or the request is not refused any more.
            ttft_slo_s = None
        return PlaceQuery(
            request_id=request.request_id,
            num_tokens=len(request.token_ids),
            num_growth_tokens=request.sampling.max_tokens - request.num_emitted,
            granules=self.granules,
            may_be_local=shape.max_local_tokens > 0,
            has_prefill_pool=shape.has_prefill_pool,
            tpot_slo_s=shape.tpot_slo_s,
            ttft_slo_s=None if ttft_slo_s is None else ttft_slo_s - (now_s - self.arrival.at_s),
        )

    def record(self) -> Record:
        """Returns what a report needs."""
        arrival = self.arrival
        return Record(
            at_s=arrival.at_s,
            num_prompt_tokens=arrival.num_prompt_tokens,
            num_output_tokens=arrival.num_output_tokens,
            cached_tokens=self.cached_tokens,
            ttft_s=None if self.first_s is None else self.first_s - arrival.at_s,
            tpot_s=self._tpot_s(),
            hand_over_s=(
                None
                if self.first_s is None or self.second_s is None
                else self.second_s - self.first_s
            ),
            end_s=self.last_s,
            attempts=self.request.attempt,
            outcome=self.outcome,
        )

    def _tpot_s(self) -> float | None:
        if self.first_s is None or self.last_s is None or self.outcome is not Outcome.DONE:
            return None
        gaps = self.arrival.num_output_tokens - 1
        return (self.last_s - self.first_s) / gaps if gaps else 0.0


def begin_journey(
    number: int, arrival: Arrival, block_size: int, chains: PromptChains | None
) -> Journey:
    """Returns the first attempt of a request, its prompt hashed; chains: those known already."""
    prompt = arrival.prompt()
    content = arrival.output_content
    request = Request(
        request_id=RequestId(f"r{number}"),
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(max_tokens=arrival.num_output_tokens, ignore_eos=True),
    )
    if chains is None:
        chain = PieceChain(arrival.pieces, block_size)
    else:
        chain = chains.of(arrival.pieces, block_size)
    return Journey(
        arrival=arrival,
        request=request,
        token=_FIRST_OUTPUT_CONTENT + number if content is None else content,
        chain=chain,
        granules=chain.granules(),
    )
