"""Times products on the device, for `product_table`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch
from torch import Tensor

from pdserve.kernels.product_plan import ProductPlan
from pdserve.kernels.product_table import LayerShape
from pdserve.kernels.small_product import small_product

MAX_LAUNCHES = 16
NUM_COMPILE_THREADS = 16


def time_graph(launch: Callable[[], None], num_replays: int = 5) -> float:
    """Returns the median milliseconds of a CUDA graph of what `launch` launches."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_replays + 1)]
    with torch.cuda.stream(stream):
        graph.replay()
        for event in events[:-1]:
            event.record()
            graph.replay()
        events[-1].record()
    stream.synchronize()
    times = sorted(begin.elapsed_time(end) for begin, end in pairwise(events))
    return times[len(times) // 2]


class ProductTimer:
    """Measures plans on a model's own weights, layer after layer, so that none is in L2."""

    def __init__(
        self,
        weights: Mapping[LayerShape, Sequence[Tensor]],
        *,
        use_pdl: bool,
        read_bytes_per_s: float,
    ) -> None:
        """Keeps the weights until the timer is dropped.

        Args:
            weights: of each shape, one or more layers.
            use_pdl: whether products will be launched before the previous kernel has ended.
            read_bytes_per_s: at which the next kernel reads partial sums.
        """
        self._weights = weights
        self._use_pdl = use_pdl
        self._read_bytes_per_s = read_bytes_per_s

    def compile(self, wanted: Iterable[tuple[LayerShape, int, ProductPlan]]) -> None:
        """Compiles kernels side by side, by launching each; Triton keeps them on disk."""
        items = list(wanted)
        # The first launch of a kernel sets up what all its variants share: not side by side.
        for item in {plan.kernel: (shape, rows, plan) for shape, rows, plan in items}.values():
            self._launch_once(item)
        with ThreadPoolExecutor(NUM_COMPILE_THREADS) as pool:
            list(pool.map(self._launch_once, items))
        torch.cuda.synchronize()

    def __call__(self, shape: LayerShape, num_rows: int, plan: ProductPlan | None) -> float:
        """Returns microseconds of a product, with what the consumer pays for partial sums."""
        weights = self._weights[shape]
        launches = [weights[index % len(weights)] for index in range(MAX_LAUNCHES)]
        x = torch.randn(num_rows, shape.num_inputs, device=weights[0].device)
        x = x.to(weights[0].dtype)
        out = self._make_out(shape, num_rows, plan)

        def launch() -> None:
            for weight in launches:
                if plan is None:
                    torch.mm(x, weight.T, out=out[0])
                else:
                    small_product(x, weight, out, plan, use_pdl=self._use_pdl)

        us = 1000 * time_graph(launch) / len(launches)
        if out.shape[0] > 1:
            us += 1e6 * out.numel() * out.element_size() / self._read_bytes_per_s
        return us

    def _make_out(self, shape: LayerShape, num_rows: int, plan: ProductPlan | None) -> Tensor:
        weight = self._weights[shape][0]
        num_splits = 1 if plan is None else plan.num_splits
        return torch.empty(
            num_splits,
            num_rows,
            shape.num_outputs,
            device=weight.device,
            dtype=torch.float32 if num_splits > 1 else weight.dtype,
        )

    def _launch_once(self, item: tuple[LayerShape, int, ProductPlan]) -> None:
        shape, num_rows, plan = item
        weight = self._weights[shape][0]
        x = torch.zeros(num_rows, shape.num_inputs, device=weight.device, dtype=weight.dtype)
        out = self._make_out(shape, num_rows, plan)
        small_product(x, weight, out, plan, use_pdl=self._use_pdl)
