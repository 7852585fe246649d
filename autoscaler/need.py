"""How many replicas a load needs: from times that a predictor knows, or without them. Pure."""

from dataclasses import dataclass
from math import ceil, inf, sqrt

from autoscaler.queueing import servers_needed
from autoscaler.settings import ScalingSettings
from pdserve.predictor.predictor import Predictor

_MAX_BATCH = 65_536
FORESEEN = "what prefill is about to send"


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Replicas, and the term that asks for most of them."""

    replicas: int
    why: str
    offered: float = 0.0
    backlog_s: float | None = None
    predicted_s: float | None = None
    """Seconds by the predictor that it rests on; None where it rests on something else."""
    tokens_per_s: float | None = None
    """For decode: what a replica makes at the largest batch that it can take on target."""
    foreseen: int = 0
    """For decode: replicas for what prefill is about to send, whatever there is now."""
    service_s: float | None = None
    """For prefill: mean seconds of a prompt, predicted or measured."""
    variability: float = 0.0
    """Of the prompts' lengths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillLoad:
    """What comes to a prefill pool, and what waits there."""

    worker_class: str
    requests_per_s: float
    tokens_per_s: float
    backlog_tokens: int
    num_prompts: int
    """That wait or are computed."""
    oldest_s: float
    num_serving: int
    busy_replicas: float
    """How many of them had work, on the mean."""
    measured_tokens_per_s: float | None
    """Of a busy replica; for as long as the predictor knows nothing."""
    start_s: float
    """Until a replica that is started now would serve."""
    chunk_tokens: int = 0
    """Most prompt tokens of a step; 0: not known."""
    recent_per_s: float = 0.0
    """Requests of the last few seconds: what there is of a burst before the mean has seen it."""
    coming_s: float = 0.0
    """Seconds that those which start now will have served by then."""
    growth: float = 1.0
    """The rate by then, over the rate now."""
    variability: float = 0.0
    """Of the prompts' lengths; see `autoscaler.lengths`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """What a prefill pool sends while it catches up."""

    per_s: float
    """Prompts: as many as come and wait, but no more than those replicas can that serve or start.
    """
    comes_per_s: float
    num_prompts: float
    """That there are already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeLoad:
    """What a decode pool has, and what waits for it."""

    worker_class: str
    num_sequences: float
    """That run there, wait there, or wait at a prefill replica for a place."""
    mean_sequences: float
    """The same on the mean of the last while."""
    num_running: float
    used_tokens: float
    tokens_per_replica: float
    """KV that one holds; 0 while nobody is there to say."""
    max_num_seqs: int
    measured_tpot_s: float | None
    num_serving: int
    tokens_of_each: float
    """KV of a sequence that runs."""
    made_tokens_per_s: float = 0.0
    """On the mean of the last while."""
    tokens_per_request: float = 0.0
    """Of output, as seen so far."""
    flow: Flow | None = None
    """None while prefill need not catch up."""
    growth: float = 1.0
    """As of PrefillLoad."""


def prefill_need(
    load: PrefillLoad, settings: ScalingSettings, predictor: Predictor, margin: float = 0.0
) -> Need:
    """Returns how many replicas keep TTFT on target.

    Args:
        load: as of now.
        settings: targets.
        predictor: knows seconds, or nothing.
        margin: of more load, to see whether fewer replicas would do.
    """
    scale = (1.0 + margin) * load.growth
    tokens_per_request = load.tokens_per_s / load.requests_per_s if load.requests_per_s > 0 else 0.0
    predicted_s = predict_prompt_s(load, tokens_per_request, predictor)
    service_s = predicted_s
    if load.measured_tokens_per_s is not None:
        # Longer than predicted: what is cached is read as well, and long prompts may be more so.
        service_s = max(service_s or 0.0, tokens_per_request / load.measured_tokens_per_s)
    if service_s is None:
        return _need_by_tokens(load, settings, margin)
    rate = load.requests_per_s * scale
    offered = rate * service_s
    by_rate = count_servers(offered, service_s, settings, load.variability)
    # A queue of many prompts is worth its tokens; the fixed cost of each step is small beside it.
    backlog_s = _backlog_s(load, tokens_per_request, service_s, predictor)
    by_backlog = 0
    if backlog_s > settings.ttft_s * max(load.num_serving, 1):
        # What waits is no chance: so much comes as came in the last few seconds.
        comes = max(offered, load.recent_per_s * service_s)
        # What will be left of it once new replicas serve.
        left_s = backlog_s + (comes - load.num_serving) * load.start_s - load.coming_s
        if left_s > 0:
            by_backlog = ceil(comes + left_s / settings.catch_up_s)
    return Need(
        replicas=max(by_rate, by_backlog),
        why="backlog" if by_backlog > by_rate else "arrivals",
        offered=offered,
        backlog_s=backlog_s,
        predicted_s=predicted_s,
        service_s=service_s,
        variability=load.variability,
    )


def count_servers(
    offered: float, service_s: float, settings: ScalingSettings, variability: float
) -> int:
    """Returns how many prefill replicas keep TTFT on target for seconds that come per second.

    Prompts take times that vary as exponential ones do, or as their lengths if that is more.
    """
    return servers_needed(
        offered,
        service_s,
        settings.ttft_s - service_s,
        tail=settings.tail,
        utilization=settings.utilization,
        variability=max(variability, 1.0),
    )


def predict_prompt_s(load: PrefillLoad, num_tokens: float, predictor: Predictor) -> float | None:
    """Returns the seconds of a prompt in steps of the replica's size; None while nothing is known.

    The law's terms add up over the pieces of a prompt, but for the fixed cost of each step. Its
    last one grows with the square of the length, whose mean is that of a mean prompt behind as much
    context as lengths vary.
    """
    context = num_tokens * load.variability / 2
    whole_s = predictor.prefill_s(load.worker_class, num_tokens, context)
    step_s = predictor.prefill_s(load.worker_class, 0)
    if whole_s is None or step_s is None or load.chunk_tokens == 0:
        return whole_s
    return whole_s + max(ceil(num_tokens / load.chunk_tokens) - 1, 0) * step_s


def decode_need(
    load: DecodeLoad, settings: ScalingSettings, predictor: Predictor, margin: float = 0.0
) -> Need:
    """Returns how many replicas have room for all sequences and keep TPOT on target."""
    scale = (1.0 + margin) * load.growth
    sequences = load.num_sequences * scale
    if margin:
        # How many there are at once varies as a Poisson number does: twice its deviation.
        sequences = load.mean_sequences * scale
        sequences += 2.0 * sqrt(sequences)
    largest = _largest_batch(load, settings, predictor)
    batch, batch_s = _full_batch(load, settings, predictor, largest)
    if sequences <= 0 and load.flow is None:
        return Need(replicas=0, why="nothing to decode", tokens_per_s=batch / batch_s)
    terms = [(ceil(sequences / load.max_num_seqs), "sequences")]
    if load.tokens_per_replica > 0:
        # Those that wait will take as much as those that run, or have it reserved already.
        held = load.used_tokens * (1.0 + margin) * load.growth
        tokens = max(held, sequences * load.tokens_of_each)
        terms.append((ceil(tokens / (settings.kv_share * load.tokens_per_replica)), "KV"))
    foreseen = ceil(_foreseen_sequences(load, load.tokens_per_request * batch_s) / batch)
    terms.append((foreseen, FORESEEN))
    if largest is not None:
        terms.append((ceil(sequences / largest), "TPOT"))
        if margin:
            terms.append((_fewest_on_target(load, predictor, largest, 1.0 + margin), "TPOT"))
    elif (load.measured_tpot_s or 0.0) > settings.tpot_s and load.num_running > load.num_serving:
        # Without a predictor one more is tried; with one sequence each, no number of them helps.
        terms.append((load.num_serving + 1, "measured TPOT"))
    replicas, why = max(terms, key=lambda term: term[0])
    offered = sequences / largest if largest is not None else sequences / load.max_num_seqs
    each = load.num_running / max(load.num_serving, 1)
    step_s = predictor.decode_step_s(
        load.worker_class, each, load.used_tokens / max(load.num_serving, 1)
    )
    return Need(
        replicas=replicas,
        why=why,
        offered=offered,
        predicted_s=step_s,
        tokens_per_s=batch / batch_s,
        foreseen=foreseen,
    )


def _need_by_tokens(load: PrefillLoad, settings: ScalingSettings, margin: float) -> Need:
    """Nobody knows how long tokens take: the share of time that replicas are busy tells the load.

    A pool that is always busy asks for one more; what waits, for as many as keep queues short.
    """
    by_queue = ceil(load.backlog_tokens * (1.0 + margin) / settings.queue_tokens)
    busy = load.busy_replicas * (1.0 + margin) * load.growth
    by_time = ceil(busy / settings.utilization - 1e-9)
    if by_queue > by_time:
        return Need(replicas=by_queue, why="waiting tokens", offered=busy)
    return Need(replicas=by_time, why="busy replicas", offered=busy)


def _backlog_s(
    load: PrefillLoad, tokens_per_request: float, service_s: float, predictor: Predictor
) -> float:
    if not load.backlog_tokens:
        return 0.0
    if tokens_per_request > 0:
        return load.backlog_tokens / tokens_per_request * service_s
    predicted_s = predictor.prefill_s(load.worker_class, load.backlog_tokens)
    if predicted_s is None and load.measured_tokens_per_s is not None:
        predicted_s = load.backlog_tokens / load.measured_tokens_per_s
    return predicted_s or 0.0


def _fewest_on_target(load: DecodeLoad, predictor: Predictor, largest: int, scale: float) -> int:
    """Returns how few of the present replicas could make what is made now, times a scale.

    Fewer have larger batches, whose steps take longer, so that there are more sequences at once:
    b = r (fixed + each b) for r tokens a second of each replica. And chance on top, as above.
    """
    fixed_s = predictor.decode_step_s(load.worker_class, 0, 0) or 0.0
    one_s = predictor.decode_step_s(load.worker_class, 1, load.tokens_of_each) or 0.0
    for count in range(1, load.num_serving):
        rate = load.made_tokens_per_s * scale / count
        room = 1.0 - rate * (one_s - fixed_s)
        sequences = count * rate * fixed_s / room if room > 0 else inf
        if sequences + 2.0 * sqrt(sequences) <= count * largest:
            return count
    return load.num_serving


def _full_batch(
    load: DecodeLoad, settings: ScalingSettings, predictor: Predictor, largest: int | None
) -> tuple[float, float]:
    """Returns the largest batch that is on target and has room, and the seconds of its step.

    Where room or slots end the batch, its steps are shorter than the target. While nobody knows
    how long they take, they are taken to be just on target.
    """
    each = load.tokens_of_each
    batch = float(load.max_num_seqs if largest is None else largest)
    if each > 0 and load.tokens_per_replica > 0:
        batch = max(1.0, min(batch, settings.kv_share * load.tokens_per_replica / each))
    step_s = predictor.decode_step_s(load.worker_class, batch, batch * each)
    return batch, settings.tpot_s if largest is None or not step_s else step_s


def _foreseen_sequences(load: DecodeLoad, life_s: float) -> float:
    """Returns how many sequences there will be at once while prefill catches up: Little's law.

    No more than prefill can send within a sequence's life, and no more than wait and come.
    """
    if load.flow is None:
        return 0.0
    sent = load.flow.per_s * life_s
    return min(sent, load.flow.num_prompts + load.flow.comes_per_s * life_s)


def _largest_batch(load: DecodeLoad, settings: ScalingSettings, predictor: Predictor) -> int | None:
    """Returns how many sequences a replica decodes on target.

    None while nothing is known, and where one alone is too slow already: then no number helps.
    """
    each = load.tokens_of_each

    def is_on_target(count: int) -> bool | None:
        step_s = predictor.decode_step_s(load.worker_class, count, count * each)
        return None if step_s is None else step_s <= settings.tpot_s

    if not is_on_target(1):
        return None
    low, high = 1, min(load.max_num_seqs, _MAX_BATCH) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_on_target(middle) else (low, middle)
    return low
