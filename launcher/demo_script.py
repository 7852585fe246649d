"""What the demo asks: two rounds of concurrent requests, and the one that survives a kill."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.rpc.v1 import inference_pb2, types_pb2

MODEL = "smollm2-135m"

_PASSAGE = (
    "You answer questions about this text in one short sentence. The text: A lighthouse stands "
    "on a small island four miles off the coast. It was built in 1871 from grey granite, is 38 "
    "metres tall, and has 211 steps. Its lamp was first fed with whale oil, later with paraffin, "
    "and since 1962 with electricity. The last keeper, a woman called Marta, left the island in "
    "1984 with two goats and a piano. Since then a computer has switched the lamp on and off. On "
    "clear nights sailors see its light from a distance of 24 miles."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTurn:
    """One message of a chat."""

    role: str
    content: str = ""
    answer_of: str | None = None
    """Label of the earlier request whose answer is this message's content."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoPrompt:
    """One request of the demo."""

    label: str
    history: tuple[ChatTurn, ...]
    max_tokens: int = 24
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False

    def to_request(self, turns: Sequence[ChatTurn]) -> inference_pb2.GenerateRequest:
        """Builds the request from the history with its answers filled in."""
        messages = [inference_pb2.ChatMessage(role=t.role, content=t.content) for t in turns]
        return inference_pb2.GenerateRequest(
            chat=inference_pb2.ChatPrompt(messages=messages),
            sampling=types_pb2.SamplingParams(
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                seed=self.seed,
                ignore_eos=self.ignore_eos,
            ),
        )


def _ask(question: str, *, system: str | None = None) -> tuple[ChatTurn, ...]:
    turn = ChatTurn(role="user", content=question)
    return (turn,) if system is None else (ChatTurn(role="system", content=system), turn)


_COUNTRY = (
    "You answer questions about this text in one short sentence. The text: France is a country in "
    "western Europe with 68 million people. Its capital and largest city is Paris, on the river "
    "Seine. Visitors to Paris go up the Eiffel Tower, see the Mona Lisa in the Louvre museum, and "
    "walk along the river. The second city is Marseille, an old port on the Mediterranean Sea. In "
    "the east, the Alps rise to Mont Blanc, 4,806 metres high. The national day is the 14th of "
    "July, and the currency is the euro. Trains from Paris to Marseille take a little over three "
    "hours."
)
_FRANCE = _ask("What is the capital of France?", system=_COUNTRY)

ROUNDS = (
    (
        DemoPrompt(label="lighthouse", history=_ask("How tall is it?", system=_PASSAGE)),
        DemoPrompt(label="chat", history=_FRANCE),
        DemoPrompt(label="sum", history=_ask("What is 2+2?")),
    ),
    (
        DemoPrompt(
            label="lighthouse 2",
            history=_ask("What did the last keeper take with her?", system=_PASSAGE),
        ),
        DemoPrompt(
            label="chat, turn 2",
            history=(
                *_FRANCE,
                ChatTurn(role="assistant", answer_of="chat"),
                ChatTurn(role="user", content="Name one thing to see there."),
            ),
        ),
    ),
)

KILL_DRILL = DemoPrompt(
    label="story",
    history=_ask("Tell me a short story about a river."),
    max_tokens=28,
    temperature=0.8,
    seed=7,
    ignore_eos=True,
)
