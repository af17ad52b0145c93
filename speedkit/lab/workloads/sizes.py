"""How large the built-in nets are."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from speedkit.config import nearest
from speedkit.errors import UsageError


class NetSize(NamedTuple):
    """How large a built-in net is."""

    width: int  # channels, of the first of several stages
    depth: int  # residual blocks, of each stage
    unit: int = 8  # what a width is a multiple of: the width of an attention head
    growth: tuple[float, ...] = (1, 2, 4)  # widths of the stages, or of what lies in a block, as multiples of `width`
    inputs: int = 0  # pixels of a side, or bytes of a window


def net_size(sizes: Mapping[str, NetSize], size: str, **numbers: Any) -> NetSize:
    """Return the one of `sizes` that is called `size`, with other `numbers` (`width`, `depth`) where they are given.

    Raises UsageError for a size that there is not, and for numbers that the net cannot have.
    """
    if size not in sizes:
        raise UsageError(f"there is no size {size!r}{nearest(size, sizes)}: take {', '.join(sizes)}")
    chosen = sizes[size]._replace(**numbers)
    if chosen.width % chosen.unit or min(chosen.width, chosen.depth) < 1:
        asked = f"there is no net of width {chosen.width} and depth {chosen.depth}"
        raise UsageError(f"{asked}: take a multiple of {chosen.unit} for the width, and 1 or more for the depth")
    return chosen
