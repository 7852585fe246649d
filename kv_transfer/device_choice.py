"""Which device links read KV from."""

from kv_transfer.link_device import LinkDevice
from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.worker import HandoffConfig


def find_link_device(kv: KvTensors, config: HandoffConfig) -> LinkDevice | None:
    """Returns the GPU that a rank's KV is on; None for host memory. Engine thread only."""
    if kv.device.type == "cpu":
        return None
    # Imported here: it needs Triton, which only machines with a GPU must have.
    from pdserve.cuda.kv_traffic import KvTraffic

    return KvTraffic(kv, nccl_max_ctas=config.nccl_max_ctas, pack_programs=config.pack_programs)
