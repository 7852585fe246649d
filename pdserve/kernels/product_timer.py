"""Times products on the device, for `product_table`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pdserve.kernels.gluon_version import has_known_gluon
from pdserve.kernels.product_cache import kernel_version, read_table, table_path, write_table
from pdserve.kernels.product_choices import ProductDevice
from pdserve.kernels.product_plan import ProductPlan
from pdserve.kernels.product_table import LayerShape, ProductTable, measure_table
from pdserve.kernels.silu_mul import silu_mul
from pdserve.kernels.small_product import compile_product, small_product

MAX_LAUNCHES = 16
TORCH_MARGIN = 0.03  # what dependent launch saves around a product, of a chain on an H200
MEASURED_BUCKETS = (1, 8, 16, 32, 64, 128, 256)
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
    times: list[float] = sorted(begin.elapsed_time(end) for begin, end in pairwise(events))
    return times[len(times) // 2]


@triton.jit(do_not_specialize=["num_splits", "num_rows"])
def _renew_rows_kernel(
    partials_ptr,
    x_ptr,
    num_splits,
    num_rows,
    num_outputs,
    num_inputs,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_inputs
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(num_splits):
        partials = partials_ptr + (split * num_rows + row).to(tl.int64) * num_outputs
        total += tl.load(partials + columns % num_outputs, mask=mask, other=0.0).to(tl.float32)
    total = tl.minimum(tl.maximum(total, -1.0), 1.0)
    x = x_ptr + row.to(tl.int64) * num_inputs
    tl.store(x + columns, total.to(x_ptr.dtype.element_ty), mask=mask)


def _renew_rows(partials_SMN: Tensor, x_MK: Tensor, *, use_pdl: bool) -> None:
    """Writes rows from a result, as the small kernels between the products of a layer do."""
    num_splits, num_rows, num_outputs = partials_SMN.shape
    num_inputs = x_MK.shape[1]
    _renew_rows_kernel[(num_rows, triton.cdiv(num_inputs, 1024))](
        partials_SMN,
        x_MK,
        num_splits,
        num_rows,
        num_outputs,
        num_inputs,
        BLOCK=1024,
        USE_PDL=use_pdl,
        num_warps=4,
        launch_pdl=use_pdl,
    )


class ProductTimer:
    """Measures plans on a model's own weights, layer after layer, so that none is in L2."""

    def __init__(
        self,
        weights: Mapping[LayerShape, Sequence[Tensor]],
        *,
        head: LayerShape,
        use_pdl: bool,
    ) -> None:
        """Keeps the weights until the timer is dropped.

        Args:
            weights: of each shape, one or more layers.
            head: the shape whose products are logits, float32.
            use_pdl: whether products will be launched before the previous kernel has ended.
        """
        self._weights = weights
        self._head = head
        self._use_pdl = use_pdl

    def compile(self, wanted: Iterable[tuple[LayerShape, int, ProductPlan]]) -> None:
        """Compiles kernels side by side; Triton keeps them on disk."""
        items = list(wanted)
        # The first call of a kernel sets up what all its variants share: not side by side.
        for item in {plan.kernel: (shape, rows, plan) for shape, rows, plan in items}.values():
            self._compile_one(item)
        with ThreadPoolExecutor(NUM_COMPILE_THREADS) as pool:
            list(pool.map(self._compile_one, items))

    def __call__(self, shape: LayerShape, num_rows: int, plan: ProductPlan | None) -> float:
        """Returns microseconds of a product and of the small kernel that reads its result.

        Of a gated layer up to silu(gate) * up, whether or not the product does that.
        """
        weights = self._weights[shape]
        launches = [weights[index % len(weights)] for index in range(MAX_LAUNCHES)]
        x = torch.randn(num_rows, shape.num_inputs, device=weights[0].device)
        x = x.to(weights[0].dtype)
        out = self._make_out(shape, num_rows, plan)
        inner = None
        if shape.is_gated and (plan is None or plan.kernel != "gated"):
            inner = torch.empty(num_rows, shape.num_outputs // 2, device=x.device, dtype=x.dtype)

        def launch() -> None:
            for weight in launches:
                self._multiply(x, weight, out, plan)
                if inner is not None:
                    silu_mul(out, inner, use_pdl=self._use_pdl)
                result = out if inner is None else inner.unsqueeze(0)
                _renew_rows(result, x, use_pdl=self._use_pdl)

        return 1000 * time_graph(launch) / len(launches)

    def _make_out(self, shape: LayerShape, num_rows: int, plan: ProductPlan | None) -> Tensor:
        weight = self._weights[shape][0]
        num_splits = 1 if plan is None else plan.num_splits
        is_gated = plan is not None and plan.kernel == "gated"
        return torch.empty(
            num_splits,
            num_rows,
            shape.num_outputs // (2 if is_gated else 1),
            device=weight.device,
            dtype=torch.float32 if num_splits > 1 or shape == self._head else weight.dtype,
        )

    def _multiply(
        self, x_MK: Tensor, weight_NK: Tensor, out_SMN: Tensor, plan: ProductPlan | None
    ) -> None:
        if plan is not None:
            small_product(x_MK, weight_NK, out_SMN, plan, use_pdl=self._use_pdl)
        elif out_SMN.dtype == weight_NK.dtype:
            torch.mm(x_MK, weight_NK.T, out=out_SMN[0])
        else:
            torch.mm(x_MK, weight_NK.T, out_dtype=out_SMN.dtype, out=out_SMN[0])

    def _compile_one(self, item: tuple[LayerShape, int, ProductPlan]) -> None:
        shape, num_rows, plan = item
        weight = self._weights[shape][0]
        x = torch.empty(num_rows, shape.num_inputs, device=weight.device, dtype=weight.dtype)
        out = self._make_out(shape, num_rows, plan)
        compile_product(x, weight, out, plan, use_pdl=self._use_pdl)


def make_product_table(
    weights: Mapping[LayerShape, Sequence[Tensor]],
    *,
    head: LayerShape,
    use_pdl: bool,
    cache: Path | None,
    is_deterministic: bool,
) -> ProductTable:
    """Returns the choices for a model's layers: read from disk, or measured in a few seconds.

    Args:
        weights: of each shape, the layers' weights on the device.
        head: the shape whose products are logits, float32.
        use_pdl: whether products will be launched before the previous kernel has ended.
        cache: folder of tables of earlier starts; read if one fits, else written.
        is_deterministic: one plan a shape for all batches, nothing measured.
    """
    first = next(iter(next(iter(weights.values()))))
    properties = torch.cuda.get_device_properties(first.device)
    device = ProductDevice(
        num_sms=properties.multi_processor_count,
        has_streamed=properties.major == 9
        and has_known_gluon()
        and first.dtype in (torch.bfloat16, torch.float16),
    )
    name = (
        f"{properties.name}, {first.dtype}, torch {torch.__version__}, "
        f"triton {triton.__version__}, dependent launch {use_pdl}, kernels {kernel_version()}"
    )
    if is_deterministic:
        fixed = {shape: device.fix_plan(shape) for shape in weights}
        return ProductTable(device=name, choices={}, fixed=fixed)
    path = None if cache is None else table_path(cache, name, weights)
    known = None if path is None else read_table(path, name, weights)
    if known is not None:
        return known
    timer = ProductTimer(weights, head=head, use_pdl=use_pdl)
    timer.compile(
        (shape, num_rows, plan)
        for shape in weights
        for num_rows in MEASURED_BUCKETS
        for plan in device.list_plans(shape, num_rows)
    )
    table = measure_table(
        name,
        list(weights),
        device.list_plans,
        timer,
        buckets=MEASURED_BUCKETS,
        torch_margin=TORCH_MARGIN if use_pdl else 0.0,
    )
    if path is not None:
        write_table(path, table)
    return table
