"""What the device at hand suggests where the user said nothing, and where compiled programs are kept."""

import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.kv_cache import CacheSizes

# Bytes for the KV pools on the CPU, where memory is shared with everything else.
CPU_POOL_BYTES = 1 << 30
# Share of an accelerator's memory for weights and pools; the rest is for activations and compiled code.
ACCELERATOR_SHARE = 0.85

_LOGGER = logging.getLogger("jaxspec")


def platform() -> str:
    """What the default device is: "cpu", "tpu", or "gpu:" and its compute capability."""
    kind = jax.default_backend()
    if kind != "gpu":
        return kind
    return f"gpu:{getattr(jax.local_devices()[0], 'compute_capability', '')}"


def on_cpu() -> bool:
    """Whether the default device is the CPU."""
    return platform() == "cpu"


def default_dtype() -> str:
    """float32 on the CPU (bfloat16 products are many times slower there), bfloat16 elsewhere."""
    return "float32" if on_cpu() else "bfloat16"


def default_scan_layers() -> bool:
    """Stacked layers dispatch and trace faster; on the CPU their slices are copied (measured 20 % slower a round)."""
    return not on_cpu()


def bytes_per_token(models: Sequence[tuple[type[Any], Any]], dtype: str, backend: str) -> int:
    """Bytes that one token takes in the caches of all the models, each given as its class and its config."""
    return _cache_bytes(models, CacheSizes(1, 1, 0, jnp.dtype(dtype), backend))


def bytes_per_row(models: Sequence[tuple[type[Any], Any]], dtype: str) -> int:
    """Bytes that one row takes in them whatever its length: the states of recurrent layers."""
    return _cache_bytes(models, CacheSizes(0, 1, 1, jnp.dtype(dtype)))


def _cache_bytes(models: Sequence[tuple[type[Any], Any]], sizes: CacheSizes) -> int:
    total = 0
    for kind, config in models:
        caches = jax.eval_shape(lambda c=config, k=kind: k.init_cache(c, sizes))
        total += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))
    return total


def default_pool_tokens(
    models: Sequence[tuple[type[Any], Any]], dtype: str, backend: str, weight_bytes: int, most: int
) -> int:
    """Tokens the KV pools can hold beside the weights.

    Args:
        models: class and config of every model that has a cache.
        dtype: of the caches.
        backend: what attends to them, and sets their layout.
        weight_bytes: of all models.
        most: tokens that could ever be used (rows x context).

    Raises:
        ValueError: the weights leave no room on this device.
    """
    room = CPU_POOL_BYTES
    stats = None if on_cpu() else jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        room = int(stats["bytes_limit"] * ACCELERATOR_SHARE) - weight_bytes
    tokens = room // bytes_per_token(models, dtype, backend)
    if tokens < 2:
        raise ValueError(
            f"the weights take {weight_bytes / 2**30:.1f} GiB and leave no room for a KV cache on this device; "
            "use a smaller model or dtype, or set max_total_tokens to try all the same."
        )
    return min(tokens, most)


def check_pool_fits(models: Sequence[tuple[type[Any], Any]], dtype: str, backend: str, tokens: int) -> None:
    """Refuses KV pools that are larger than the memory of this device, weights left aside.

    Args:
        models: class and config of every model that has a cache.
        dtype: of the caches.
        backend: what attends to them, and sets their layout.
        tokens: that the pools hold.

    Raises:
        ValueError: the pools do not fit.
    """
    each, memory = bytes_per_token(models, dtype, backend), _memory_bytes()
    if memory is not None and tokens * each > memory:
        raise ValueError(
            f"max_total_tokens={tokens} needs {tokens * each / 2**30:.1f} GiB for the KV cache, and this device has "
            f"{memory / 2**30:.1f} GiB; set it to less than {memory // each}, or None for the automatic value."
        )


def _memory_bytes() -> int | None:
    """Bytes of the memory that pools lie in, None where nothing tells."""
    if on_cpu():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def keep_compiled_programs(folder: str | os.PathLike[str] | None) -> str | None:
    """Turns on JAX's persistent compilation cache: in `folder`, or the user's cache folder for "auto"; None is off.

    A folder that was configured through JAX itself wins over "auto". Where the user's cache folder cannot be written,
    a warning says so and programs are compiled at every start.

    Returns:
        The folder in use, None where programs are not kept.

    Raises:
        ValueError: `folder` cannot be written.
    """
    jax.config.update("jax_enable_compilation_cache", folder is not None)
    if folder is None:
        return None
    is_automatic = folder == "auto"
    configured = getattr(jax.config, "jax_compilation_cache_dir", None)
    if is_automatic and configured:
        return configured
    place = _user_cache() if is_automatic else Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        if is_automatic:
            _LOGGER.warning("compiled programs are not kept (%s); set compilation_cache_dir", error)
            return None
        raise ValueError(
            f"compilation_cache_dir={os.fspath(folder)!r} is no folder that can be written ({error.strerror}); "
            "set another one, or None to keep no compiled programs."
        ) from error
    jax.config.update("jax_compilation_cache_dir", os.fspath(place))
    return os.fspath(place)


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxspec" / "programs"
