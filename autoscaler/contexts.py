"""How much KV a sequence has that is decoded: from steps as replicas report them, or from blocks.

Steps say it exactly. What blocks hold includes the beginnings of prompts that are on their way.
"""

from collections.abc import Iterable

from autoscaler.figures import WorkerFigures
from autoscaler.window import Window
from pdserve.predictor.predictor import DecodeSample


class ContextMeter:
    """Tokens and sequences of the last while. One thread."""

    def __init__(self, keep_s: float) -> None:
        """Has seen nothing; forgets what is older than `keep_s`."""
        self._in_steps = Window(keep_s), Window(keep_s)
        self._in_blocks = Window(keep_s), Window(keep_s)

    def note(self, now_s: float, workers: Iterable[WorkerFigures]) -> None:
        """Takes figures of replicas that decode."""
        tokens = sequences = held = running = 0
        for worker in workers:
            held += (worker.used_blocks - worker.reserved_blocks) * worker.block_size
            running += worker.num_running
            for sample in worker.samples:
                if isinstance(sample, DecodeSample):
                    tokens += sample.num_kv_tokens
                    sequences += sample.num_sequences
        _add(self._in_blocks, now_s, held, running)
        if sequences:
            _add(self._in_steps, now_s, tokens, sequences)

    def tokens_of_each(self, over_s: float) -> float:
        """Returns the tokens of a sequence on the mean of the last seconds; 0 while none ran."""
        for tokens, sequences in (self._in_steps, self._in_blocks):
            count = sequences.mean(over_s)
            if count:
                return tokens.mean(over_s) / count
        return 0.0


def _add(windows: tuple[Window, Window], now_s: float, tokens: int, sequences: int) -> None:
    windows[0].add(now_s, tokens)
    windows[1].add(now_s, sequences)
