"""What the device at hand suggests where the user said nothing, and where compiled programs are kept."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

# Bytes for the KV pools on the CPU, where memory is shared with everything else.
CPU_POOL_BYTES = 1 << 30
# Share of an accelerator's memory for weights and pools; the rest is for activations and compiled code.
ACCELERATOR_SHARE = 0.85

_LOGGER = logging.getLogger("jaxspec")


def on_cpu() -> bool:
    """Whether the default device is the CPU."""
    return jax.default_backend() == "cpu"


def default_dtype() -> str:
    """float32 on the CPU (bfloat16 products are many times slower there), bfloat16 elsewhere."""
    return "float32" if on_cpu() else "bfloat16"


def default_scan_layers() -> bool:
    """Stacked layers dispatch and trace faster; on the CPU their slices are copied (measured 20 % slower a round)."""
    return not on_cpu()


def bytes_per_token(models: Sequence[tuple[type[Any], Any]], dtype: str) -> int:
    """Bytes that one token takes in the caches of all the models, each given as its class and its config."""
    total = 0
    for kind, config in models:
        caches = jax.eval_shape(
            lambda c=config, k=kind: k.init_cache(c, num_pages=1, page_size=1, dtype=jnp.dtype(dtype))
        )
        total += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))
    return total


def default_pool_tokens(models: Sequence[tuple[type[Any], Any]], dtype: str, weight_bytes: int, most: int) -> int:
    """Tokens the KV pools can hold beside the weights.

    Args:
        models: class and config of every model that has a cache.
        dtype: of the caches.
        weight_bytes: of all models.
        most: tokens that could ever be used (rows x context).

    Raises:
        ValueError: the weights leave no room on this device.
    """
    room = CPU_POOL_BYTES
    stats = None if on_cpu() else jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        room = int(stats["bytes_limit"] * ACCELERATOR_SHARE) - weight_bytes
    tokens = room // bytes_per_token(models, dtype)
    if tokens < 2:
        raise ValueError(
            f"the weights take {weight_bytes / 2**30:.1f} GiB and leave no room for a KV cache on this device; "
            "use a smaller model or dtype, or set max_total_tokens to try all the same."
        )
    return min(tokens, most)


def keep_compiled_programs(folder: str | os.PathLike[str] | None) -> None:
    """Turns on JAX's persistent compilation cache: in `folder`, or the user's cache folder for "auto"; None is off.

    A folder that was configured through JAX itself wins over "auto". Where the user's cache folder cannot be written,
    a warning says so and programs are compiled at every start.
    """
    if folder is None:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    jax.config.update("jax_enable_compilation_cache", True)
    if folder == "auto":
        if getattr(jax.config, "jax_compilation_cache_dir", None):
            return
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(base) / "jaxspec" / "programs"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _LOGGER.warning("compiled programs are not kept (%s); set compilation_cache_dir", error)
            return
    Path(folder).mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", os.fspath(folder))
