"""A model definition split from its weights, once: modules define and load, the loop passes leaves."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.kv_cache import Cache, CacheSizes


@dataclasses.dataclass(frozen=True)
class Network:
    """The static half of a model; hashable, so that compiled steps are shared between engines of equal networks."""

    config: Any  # ModelConfig of a Decoder, HeadConfig of a Head
    kind: type[Any]  # the module's class
    graphdef: nnx.GraphDef[Any]
    treedef: Any

    def bind(self, leaves: tuple[jax.Array, ...]) -> Any:
        """The module with these weights; meant for the inside of a traced function."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))

    def init_cache(
        self, *, num_pages: int, page_size: int, dtype: jnp.dtype, num_rows: int = 0, backend: str = "xla"
    ) -> tuple[Cache, ...]:
        """Empty caches for this model, one per layer kind; see `CacheSizes`."""
        return self.kind.init_cache(self.config, CacheSizes(num_pages, page_size, num_rows, dtype, backend))
