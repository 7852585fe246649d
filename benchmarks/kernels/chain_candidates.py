"""The plans that are compared in the chain of a decode step."""

from collections.abc import Sequence

from benchmarks.kernels.product_candidates import NUM_SMS, Shape
from pdserve.kernels.product_choices import load_defaults
from pdserve.kernels.product_plan import ProductPlan

# block_n, block_k, stages, warps
CUTS: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    8: (
        (64, 128, 6, 4),
        (64, 128, 4, 4),
        (64, 128, 3, 4),
        (64, 256, 5, 4),
        (128, 64, 6, 4),
    ),
    64: (
        (64, 128, 6, 4),
        (64, 128, 3, 4),
        (64, 64, 6, 4),
        (128, 128, 4, 4),
        (128, 64, 8, 4),
        (128, 64, 4, 4),
        (256, 64, 5, 4),
    ),
    128: (
        (64, 128, 4, 4),
        (64, 128, 2, 4),
        (64, 64, 8, 4),
        (64, 64, 4, 4),
        (128, 64, 6, 4),
        (128, 64, 6, 8),
        (128, 64, 3, 4),
        (256, 64, 4, 8),
    ),
    256: (
        (64, 64, 5, 4),
        (128, 64, 4, 8),
        (256, 64, 4, 8),
        (64, 64, 2, 4),
        (128, 64, 2, 8),
    ),
}
GATED_CUTS: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    8: ((64, 128, 3, 4), (64, 128, 5, 4), (64, 64, 6, 4), (64, 256, 3, 4), (64, 64, 12, 4)),
    32: ((64, 128, 3, 4), (64, 128, 2, 4), (64, 64, 5, 4), (64, 64, 10, 4), (64, 128, 5, 4)),
    64: (
        (64, 128, 2, 4),
        (64, 128, 4, 4),
        (64, 64, 4, 4),
        (64, 64, 9, 4),
        (64, 64, 4, 8),
        (128, 64, 5, 8),
    ),
    128: (
        (64, 64, 3, 4),
        (64, 64, 7, 4),
        (64, 64, 3, 8),
        (64, 128, 3, 4),
        (64, 128, 3, 8),
        (128, 64, 4, 8),
    ),
    256: ((64, 64, 4, 8), (64, 64, 2, 8), (128, 64, 4, 8), (128, 64, 2, 8)),
}
GATED_CUTS[16] = GATED_CUTS[8]
CUTS |= {16: CUTS[8], 32: (*CUTS[8], (64, 256, 4, 4), (128, 64, 8, 4))}


def list_candidates(shape: Shape, bucket: int, layers: Sequence[str] = ()) -> list[ProductPlan]:
    """Returns plans whose tiles fill most of two waves or less.

    If layers are named, others have the default table's plan alone.
    """
    if layers and shape.name not in layers:
        known = load_defaults().choices[shape.layer][bucket].plan
        return [] if known is None else [known]
    found = []
    for block_n, block_k, stages, warps in CUTS[bucket]:
        block_m = min(bucket, 32768 // block_n)
        num_tiles = shape.num_outputs // block_n * -(-bucket // block_m)
        ring = stages * (block_n + block_m) * block_k * 2
        slots = NUM_SMS * max(1, 227 * 1024 // (ring + 2048))
        ranked = []
        for splits in (1,) if num_tiles > NUM_SMS else (1, 2, 3, 4, 5, 8):
            waves = -(-num_tiles * splits // slots)
            if waves <= 2 or splits == 1:
                ranked.append((num_tiles * splits / waves / slots - 0.04 * splits, splits))
        found += [
            ProductPlan(
                kernel="streamed",
                num_splits=splits,
                block_n=block_n,
                block_k=block_k,
                num_stages=stages,
                num_warps=warps,
            )
            for _, splits in sorted(ranked, reverse=True)[:3]
        ]
    if shape.layer.is_gated:
        found += [
            ProductPlan(
                kernel="gated",
                num_splits=1,
                block_n=block_n,
                block_k=block_k,
                num_stages=stages,
                num_warps=warps,
            )
            for block_n, block_k, stages, warps in GATED_CUTS[bucket]
        ]
    return found
