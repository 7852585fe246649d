"""The load of the router's benchmarks, and of the floor under it."""

import grpc

NUM_STREAMS = 64
OUTPUT_TOKENS = 400
PACED_S = 0.012
"""An engine's iteration: 64 sequences make 5,300 tokens/s, which leaves no message to merge."""
NUM_RUNS = 3


async def read_stream(call: grpc.aio.UnaryStreamCall) -> tuple[int, int]:
    """Returns tokens and messages of a stream."""
    num_tokens = num_messages = 0
    async for message in call:
        num_tokens += len(message.chunk.token_ids)
        num_messages += 1
    return num_tokens, num_messages
