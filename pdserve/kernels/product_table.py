"""Which product serves which layer and batch: chosen by timing, kept as JSON.

A table maps (outputs, inputs) of a layer and a bucket of rows to a `ProductPlan`, or to None for
torch's own product. It starts from plans that were measured before (`product_defaults.json`),
times them against torch on the device at hand, and may be kept on disk for the next start. In
deterministic mode nothing is timed: each layer has one plan for every number of rows.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pdserve.kernels.product_plan import ProductPlan

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FORMAT = 2


@dataclass(frozen=True, order=True, kw_only=True, slots=True)
class LayerShape:
    """Outputs and inputs of a linear layer."""

    num_outputs: int
    num_inputs: int
    is_gated: bool = False
    """The weight's two halves are gate and up, and what is wanted is silu(gate) * up."""

    def describe(self) -> str:
        """Returns the sizes."""
        return f"{self.num_outputs} x {self.num_inputs}{', gated' if self.is_gated else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What one bucket of rows uses."""

    plan: ProductPlan | None
    """None: torch's product."""
    us: float | None
    """Measured microseconds; None if the plan was not timed."""
    torch_us: float | None
    """Microseconds of torch's product beside it."""


TimePlan = Callable[[LayerShape, int, ProductPlan | None], float]
"""Returns microseconds of a plan, or of torch's product, for a shape and a number of rows."""
ListPlans = Callable[[LayerShape, int], Iterable[ProductPlan]]
"""Returns the plans to compare with torch's product."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductTable:
    """The choices of a model's layers on one device."""

    device: str
    """Name of the device, dtype and library versions that the choices hold for."""
    choices: Mapping[LayerShape, Mapping[int, Choice]]
    """By shape and bucket of rows."""
    fixed: Mapping[LayerShape, ProductPlan]
    """Deterministic mode: one plan a shape, for every number of rows; empty otherwise."""

    def choose(self, shape: LayerShape, num_rows: int) -> ProductPlan | None:
        """Returns the plan for a batch; None stands for torch's product.

        Raises:
            KeyError: deterministic mode, and the shape has no plan.
        """
        if self.fixed:
            return self.fixed[shape]
        if num_rows > ROW_BUCKETS[-1] or shape not in self.choices:
            return None
        return self.choices[shape][find_bucket(num_rows)].plan

    def describe(self) -> str:
        """Returns the table as lines of text."""
        if self.fixed:
            lines = [f"products on {self.device}, one plan for all batches:"]
            for shape, plan in sorted(self.fixed.items()):
                lines.append(f"  {shape.describe()}: {plan.describe()}")
            return "\n".join(lines)
        lines = [f"products on {self.device}, us (torch):"]
        for shape, by_rows in sorted(self.choices.items()):
            lines.append(f"  {shape.describe()}")
            for num_rows, choice in by_rows.items():
                name = "torch" if choice.plan is None else choice.plan.describe()
                lines.append(
                    f"    {num_rows:4d} rows {_format_us(choice.us)} "
                    f"({_format_us(choice.torch_us)}) {name}"
                )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data for `json.dumps`."""
        return {
            "format": FORMAT,
            "device": self.device,
            "layers": [
                {
                    "num_outputs": shape.num_outputs,
                    "num_inputs": shape.num_inputs,
                    "is_gated": shape.is_gated,
                    "fixed": self.fixed[shape].to_json() if shape in self.fixed else None,
                    "rows": {
                        str(num_rows): {
                            "plan": choice.plan and choice.plan.to_json(),
                            "us": choice.us,
                            "torch_us": choice.torch_us,
                        }
                        for num_rows, choice in self.choices.get(shape, {}).items()
                    },
                }
                for shape in sorted({*self.choices, *self.fixed})
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Returns the table of `to_json`.

        Raises:
            ValueError: the data are of another format or hold no valid plans.
        """
        found = data.get("format") if isinstance(data, Mapping) else None
        if found != FORMAT:
            raise ValueError(f"product table of format {found!r}, expected {FORMAT}")
        choices: dict[LayerShape, dict[int, Choice]] = {}
        fixed: dict[LayerShape, ProductPlan] = {}
        try:
            for layer in data["layers"]:
                shape = LayerShape(
                    num_outputs=layer["num_outputs"],
                    num_inputs=layer["num_inputs"],
                    is_gated=layer["is_gated"],
                )
                if layer["fixed"] is not None:
                    fixed[shape] = ProductPlan.from_json(layer["fixed"])
                if layer["rows"]:
                    choices[shape] = {
                        int(num_rows): Choice(
                            plan=choice["plan"] and ProductPlan.from_json(choice["plan"]),
                            us=choice["us"],
                            torch_us=choice["torch_us"],
                        )
                        for num_rows, choice in layer["rows"].items()
                    }
            return cls(device=data["device"], choices=choices, fixed=fixed)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a product table: {error!r}") from error

    def covers(self, device: str, shapes: Iterable[LayerShape]) -> bool:
        """Returns True if the table was made for this device and has all shapes and buckets."""
        return self.device == device and all(
            set(self.choices.get(shape, {})) == set(ROW_BUCKETS) for shape in shapes
        )


def find_bucket(num_rows: int) -> int:
    """Returns the smallest bucket that holds `num_rows`, at most the largest bucket's."""
    return next(bucket for bucket in ROW_BUCKETS if num_rows <= bucket)


def measure_table(
    device: str,
    shapes: Sequence[LayerShape],
    list_plans: ListPlans,
    time_plan: TimePlan,
    *,
    buckets: Sequence[int] = ROW_BUCKETS,
    torch_margin: float = 0.0,
) -> ProductTable:
    """Chooses by timing: for each shape and bucket the quickest of torch and the listed plans.

    Torch's product is chosen only if it is quicker by more than the share `torch_margin`: it
    overlaps with neither neighbour, which a timing of the product alone does not show in full.

    Buckets that are not measured take the choice of the next larger one that is. Time for the
    consumer to read partial sums is the timer's to add, so that a split must pay for itself.
    """
    if not buckets or buckets[-1] != ROW_BUCKETS[-1]:
        raise ValueError(f"buckets must end with {ROW_BUCKETS[-1]}, got {tuple(buckets)}")
    choices: dict[LayerShape, dict[int, Choice]] = {}
    for shape in shapes:
        by_rows: dict[int, Choice] = {}
        for num_rows in buckets:
            torch_us = time_plan(shape, num_rows, None)
            timed = [
                (time_plan(shape, num_rows, plan), plan) for plan in list_plans(shape, num_rows)
            ]
            us, plan = min(timed, key=lambda pair: pair[0], default=(torch_us, None))
            if us >= torch_us * (1 + torch_margin):
                us, plan = torch_us, None
            by_rows[num_rows] = Choice(plan=plan, us=us, torch_us=torch_us)
        choices[shape] = {
            bucket: by_rows[next(rows for rows in buckets if bucket <= rows)]
            for bucket in ROW_BUCKETS
        }
    return ProductTable(device=device, choices=choices, fixed={})


def _format_us(us: float | None) -> str:
    return "   -  " if us is None else f"{us:6.1f}"
