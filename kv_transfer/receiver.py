"""The receiving end of links: a listener, and one landing ring per link."""

from torch import Tensor

from kv_transfer.events import FrameLanded, Post
from kv_transfer.protocol import LinkEndpoint
from kv_transfer.transport import LinkStatus
from pdserve.config.worker import HandoffConfig
from pdserve.request import Incarnation


class LinkListener:
    """A `FrameReceiver` over Gloo links, listening on one named address.

    `payload` and `release_slot` are called from one thread.
    """

    def __init__(
        self,
        *,
        host: str,
        incarnation: Incarnation,
        config: HandoffConfig,
        slot_bytes: int,
        post: Post,
    ) -> None:
        """Binds a free port of `host` and listens.

        Args:
            host: the one address to listen on, and to bind links to.
            incarnation: of this worker.
            config: ring size and time-outs.
            slot_bytes: the largest frame (`plan.frame_bytes`).
            post: the engine's inbox.
        """
        raise NotImplementedError

    def endpoint(self) -> LinkEndpoint:
        """Returns where prefill workers connect, and what they must say."""
        raise NotImplementedError

    def payload(self, landed: FrameLanded) -> Tensor:
        """Returns the landed bytes, uint8 [num_bytes]; valid until `release_slot`."""
        raise NotImplementedError

    def release_slot(self, landed: FrameLanded) -> None:
        """Gives a landing slot back to its link, once for each FrameLanded."""
        raise NotImplementedError

    def links(self) -> tuple[LinkStatus, ...]:
        """Lists live links."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes every link and the listening socket."""
        raise NotImplementedError
