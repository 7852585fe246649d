import pytest

from pdserve.kernels.product_choices import ProductDevice, load_defaults
from pdserve.kernels.product_table import ROW_BUCKETS, LayerShape

HOPPER = ProductDevice(num_sms=132, has_streamed=True)
AMPERE = ProductDevice(num_sms=108, has_streamed=False)
QKV_8B = LayerShape(num_outputs=6144, num_inputs=4096)
SMALL = LayerShape(num_outputs=576, num_inputs=1536)
SHAPES = (
    QKV_8B,
    SMALL,
    LayerShape(num_outputs=49152, num_inputs=576),
    LayerShape(num_outputs=960, num_inputs=100),
    LayerShape(num_outputs=1, num_inputs=1),
)


WHOLE_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
GATED_8B = ((28672, 4096), (14336, 4096))
HALF_8B = ((3072, 4096), (4096, 2048), (14336, 4096), (4096, 7168), (64128, 4096))


@pytest.mark.parametrize(
    ("sizes", "buckets"), [(WHOLE_8B, ROW_BUCKETS), (HALF_8B, (1, 2, 4, 8, 64, 128, 256))]
)
def test_the_shapes_of_llama_8b_on_one_gpu_and_on_two_come_with_measured_plans(
    sizes: tuple[tuple[int, int], ...], buckets: tuple[int, ...]
) -> None:
    choices = load_defaults().choices
    for num_outputs, num_inputs in sizes:
        is_gated = (num_outputs, num_inputs) in GATED_8B
        shape = LayerShape(num_outputs=num_outputs, num_inputs=num_inputs, is_gated=is_gated)
        assert tuple(choices[shape]) == buckets


def test_a_known_shape_is_verified_with_its_measured_plan_alone() -> None:
    measured = load_defaults().choices[QKV_8B]
    assert list(HOPPER.list_plans(QKV_8B, 3)) == [measured[4].plan]


def test_measured_plans_of_hopper_are_not_tried_elsewhere() -> None:
    assert {plan.kernel for plan in AMPERE.list_plans(QKV_8B, 64)} == {"tiled"}


@pytest.mark.parametrize("device", [HOPPER, AMPERE])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_plan_leaves_each_split_at_least_one_block(
    device: ProductDevice, shape: LayerShape
) -> None:
    plans = [device.fix_plan(shape)]
    plans += [plan for num_rows in ROW_BUCKETS for plan in device.list_plans(shape, num_rows)]
    for plan in plans:
        assert plan.num_splits <= -(-shape.num_inputs // plan.block_k)


def test_a_layer_of_few_outputs_is_split_until_most_multiprocessors_have_a_tile() -> None:
    plan = HOPPER.fix_plan(LayerShape(num_outputs=4096, num_inputs=4096))
    assert 4096 // plan.block_n * plan.num_splits == 128


def test_inputs_that_the_copy_engine_cannot_address_go_to_the_portable_kernels() -> None:
    shape = LayerShape(num_outputs=64, num_inputs=100)
    assert HOPPER.fix_plan(shape).kernel == "tiled"
    assert {plan.kernel for plan in HOPPER.list_plans(shape, 64)} == {"tiled"}


def test_only_few_rows_are_tried_without_tensor_cores() -> None:
    assert "row" in {plan.kernel for plan in HOPPER.list_plans(SMALL, 4)}
    assert "row" not in {plan.kernel for plan in HOPPER.list_plans(SMALL, 16)}


def test_of_a_gated_layer_products_with_and_without_the_gate_are_tried() -> None:
    shape = LayerShape(num_outputs=3072, num_inputs=576, is_gated=True)
    for num_rows in ROW_BUCKETS:
        kernels = {plan.kernel for plan in HOPPER.list_plans(shape, num_rows)}
        assert {"gated", "streamed"} <= kernels
        assert "gated" not in {plan.kernel for plan in AMPERE.list_plans(shape, num_rows)}
    assert HOPPER.fix_plan(shape).kernel == "gated"
    assert AMPERE.fix_plan(shape).kernel == "tiled"


def test_a_layer_without_a_gate_is_never_given_one() -> None:
    for num_rows in ROW_BUCKETS:
        assert "gated" not in {plan.kernel for plan in HOPPER.list_plans(SMALL, num_rows)}
