"""What all routers have seen together, over those that come, go and start anew. Pure."""

from collections.abc import Mapping
from dataclasses import replace

from autoscaler.figures import Traffic


class TrafficSum:
    """Adds up what each router has counted since it was last asked. One thread."""

    def __init__(self) -> None:
        """Has asked nobody."""
        self._last: dict[str, Traffic] = {}
        self._total = Traffic(num_arrived=0, prompt_tokens=0, output_tokens=0)

    def add(self, answers: Mapping[str, Traffic]) -> Traffic | None:
        """Takes the routers' answers, by their addresses; None if there is none at all.

        A router that is new counts from now on; one that did not answer has what it counted
        meanwhile added later.
        """
        if not answers:
            return None
        total = self._total
        for name, now in answers.items():
            last = self._last.get(name, now)
            total = replace(
                total,
                num_arrived=total.num_arrived + _grown(last.num_arrived, now.num_arrived),
                prompt_tokens=total.prompt_tokens + _grown(last.prompt_tokens, now.prompt_tokens),
                output_tokens=total.output_tokens + _grown(last.output_tokens, now.output_tokens),
            )
        self._last.update(answers)
        self._total = replace(
            total,
            num_waiting=sum(one.num_waiting for one in answers.values()),
            waiting_tokens=sum(one.waiting_tokens for one in answers.values()),
            oldest_s=max(one.oldest_s for one in answers.values()),
            num_in_flight=sum(one.num_in_flight for one in answers.values()),
        )
        return self._total


def _grown(before: int, now: int) -> int:
    """Returns what was counted since; a counter that fell has started anew."""
    return now - before if now >= before else now
