"""Keeps product tables on disk, so that a later start measures nothing.

A file is named after all that its choices hold for: device, dtype, versions, layer shapes and the
source of the product kernels. Several processes may write the same one at a time.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from pdserve.kernels.product_table import ROW_BUCKETS, LayerShape, ProductTable

logger = logging.getLogger(__name__)

_SOURCES = (
    "small_product.py",
    "streamed_product.py",
    "product_choices.py",
    "product_timer.py",
    "product_defaults.json",
)


def kernel_version() -> str:
    """Returns a short hash of all that decides which plans there are and how quick they are."""
    digest = hashlib.sha256()
    folder = resources.files("pdserve.kernels")
    for name in _SOURCES:
        digest.update(folder.joinpath(name).read_bytes())
    return digest.hexdigest()[:12]


def table_path(folder: Path, device: str, shapes: Iterable[LayerShape]) -> Path:
    """Returns the file of a table.

    Args:
        folder: of all tables.
        device: what the choices hold for, beside the shapes.
        shapes: of a model's layers, in any order.
    """
    sizes = [(shape.num_outputs, shape.num_inputs) for shape in sorted(shapes)]
    text = json.dumps([device, sizes, ROW_BUCKETS])
    return folder / f"products-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def read_table(path: Path, device: str, shapes: Iterable[LayerShape]) -> ProductTable | None:
    """Returns the table of an earlier start; None if there is none that fits.

    A file that is damaged, or that was put there from elsewhere, is told of and left alone: the
    next `write_table` replaces it.
    """
    try:
        table = ProductTable.from_json(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _warn("product table ignored: not readable", path, error)
        return None
    if not table.covers(device, shapes):
        _warn("product table ignored: made for something else", path, table.device)
        return None
    return table


def write_table(path: Path, table: ProductTable) -> None:
    """Writes a table as a whole or not at all; a disk that takes none costs only a warning."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=path.stem, suffix=".part", delete=False
        ) as file:
            try:
                json.dump(table.to_json(), file, indent=1)
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        _warn("product table not kept", path, error)


def _warn(message: str, path: Path, why: object) -> None:
    logger.warning(message, extra={"path": str(path), "why": str(why)})
