"""Where a run's arrays are: rows of a batch are spread over all devices, everything else is on each of them."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

_Tree = TypeVar("_Tree")
_AXIS = "data"


class Places:
    """Puts arrays onto a mesh of all devices, where there is more than one.

    Args:
        num_rows: rows of a batch.

    Raises:
        ValueError: they cannot be spread evenly.
    """

    def __init__(self, num_rows: int):
        count = jax.device_count()
        if num_rows % count:
            raise ValueError(
                f"rows={num_rows} cannot be spread over {count} devices; set rows to a multiple of {count}."
            )
        self._mesh = jax.make_mesh((count,), (_AXIS,), axis_types=(AxisType.Auto,)) if count > 1 else None

    def rows(self, tree: _Tree) -> _Tree:
        """Arrays whose first axis is the rows of a batch."""
        return self._put(tree, PartitionSpec(_AXIS))

    def copies(self, tree: _Tree) -> _Tree:
        """Arrays that every device needs whole."""
        return self._put(tree, PartitionSpec())

    def _put(self, tree: _Tree, spec: PartitionSpec) -> _Tree:
        if self._mesh is None:
            return jax.tree.map(jnp.asarray, tree)
        return jax.device_put(tree, NamedSharding(self._mesh, spec))
