"""Turns a checkpoint into the leaves of a model, one tensor at a time."""

import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.sharding import SingleDeviceSharding

from jaxspec.cpu.panels import Panels
from jaxspec.loading.checkpoint import Checkpoint
from jaxspec.loading.dequantised import dequantised, refuse_quantised
from jaxspec.loading.names import stored_by_name, unread_names
from jaxspec.models import MODELS, ModelConfig
from jaxspec.models.tensor_names import Source
from jaxspec.models.weights import pack_weights

_MODEL_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
_STORED_DTYPES = (*_MODEL_DTYPES, np.dtype(np.float64))
_MAX_NAMES = 20

# Path of a leaf in the model; flax types its parts by a protocol of its own.
LeafPath: TypeAlias = tuple[Any, ...]


class LoadedModel(NamedTuple):
    """A model taken apart: `nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))` puts it together, also in jit."""

    config: ModelConfig
    graphdef: Any
    treedef: Any
    leaves: tuple[jax.Array, ...]


class FilledModule(NamedTuple):
    """A module taken apart, as in `LoadedModel`."""

    graphdef: Any
    treedef: Any
    leaves: tuple[jax.Array, ...]


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: npt.DTypeLike,
    scan_layers: bool,
    device: SingleDeviceSharding | None = None,
    panel_dtype: str | None = None,
) -> LoadedModel:
    """Fills a model's weights from a checkpoint.

    Host memory holds one tensor at a time besides the leaves: each is mapped or dequantised, sent to the device, and
    transposed and cast there, straight into its row where layers are stacked.

    Args:
        checkpoint: what `open_checkpoint` returns.
        dtype: of every weight: float32, bfloat16 or float16.
        scan_layers: equal layers are stacked, see `Decoder`.
        device: where the leaves go, as a sharding; the default device if None.
        panel_dtype: weights that are multiplied become panels of this dtype for the CPU's kernel; None is plain arrays.

    Raises:
        ValueError: an unsupported model or dtype, quantised weights, or tensors that are missing, not expected or of
            another shape than the config says; the error lists their names.
    """
    config = ModelConfig.from_hf(checkpoint.config)
    checkpoint = dequantised(checkpoint)
    model_class = MODELS[config.architecture]
    stored = stored_by_name(checkpoint)
    places = model_class.tensor_map(config, scan_layers, stored)
    filled = fill_module(
        checkpoint,
        lambda dtype: model_class(config, dtype=dtype, scan_layers=scan_layers, rngs=None),
        {stored.get(name, name): place for name, place in places.items()},
        dtype=dtype,
        ignored=(*model_class.ignored(config), *unread_names(stored, config)),
        device=device,
        panel_dtype=panel_dtype,
    )
    return LoadedModel(config, *filled)


def fill_module(
    checkpoint: Checkpoint,
    build: Callable[[jnp.dtype], nnx.Module],
    sources: Mapping[str, Source],
    *,
    dtype: npt.DTypeLike,
    ignored: Sequence[str] = (),
    given: Mapping[LeafPath, jax.Array | Panels] | None = None,
    device: SingleDeviceSharding | None = None,
    panel_dtype: str | None = None,
) -> FilledModule:
    """Fills a module's weights from a checkpoint; see `load_model`.

    Args:
        checkpoint: what `open_checkpoint` returns.
        build: makes the module; it is only traced.
        sources: tensor name -> where it goes; together with `given`, every weight of the module.
        dtype: of every weight: float32, bfloat16 or float16.
        ignored: glob patterns of tensors that are not read.
        given: arrays for leaves that the checkpoint does not fill; they are taken as they are.
        device: where the leaves go, as a sharding; the default device if None.
        panel_dtype: weights that are multiplied become panels of this dtype for the CPU's kernel; None is plain arrays.

    Raises:
        ValueError: an unsupported dtype, quantised weights, or tensors that do not fit; the error lists their names.
    """
    dtype = np.dtype(dtype)
    if dtype not in _MODEL_DTYPES:
        raise ValueError(f"dtype={dtype.name} is not supported; use float32, bfloat16 or float16.")
    refuse_quantised(checkpoint)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: build(jnp.dtype(dtype))), nnx.Param)
    targets = dict(nnx.to_flat_state(state))
    _check_tensors(checkpoint, sources, targets, ignored)
    filled = {**_fill(checkpoint, sources, targets, device), **(given or {})}
    weights = {path: leaf.replace(filled.pop(path)) for path, leaf in targets.items()}
    if panel_dtype is not None:
        pack_weights(weights, panel_dtype)
    leaves, treedef = jax.tree.flatten(nnx.from_flat_state(list(weights.items())))
    return FilledModule(graphdef, treedef, tuple(leaves))


def _check_tensors(
    checkpoint: Checkpoint, sources: Mapping[str, Source], targets: Mapping[LeafPath, Any], ignored: Sequence[str]
) -> None:
    """Raises one error that lists every name that does not fit the model."""
    shapes = checkpoint.shapes
    missing = [name for name in sources if name not in shapes]
    unexpected = [
        name for name in shapes if name not in sources and not any(fnmatch.fnmatchcase(name, glob) for glob in ignored)
    ]
    misshapen = []
    for name, source in sources.items():
        expected = _stored_shape(source, targets[source.path].shape)
        if name in shapes and shapes[name] != expected:
            misshapen.append(f"{name} {list(shapes[name])} instead of {list(expected)}")
    kinds = {"missing": missing, "not expected": unexpected, "of another shape": misshapen}
    problems = [f"{len(names)} {kind}: {_some(names)}" for kind, names in kinds.items() if names]
    if problems:
        raise ValueError(
            f"{checkpoint.path}: tensors do not fit the model of its config. {'. '.join(problems)}. Use a checkpoint "
            "whose tensors and config belong together, or correct its config.json."
        )


def _some(names: list[str]) -> str:
    rest = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f", and {rest} more" if rest > 0 else "")


def _stored_shape(source: Source, leaf_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that the checkpoint should have for a leaf, or for its part of a stacked one."""
    shape = leaf_shape[len(source.index) :]
    if source.columns is not None:
        first, end = source.columns
        shape = (*shape[:-1], end - first)
    return (*shape[:-2], shape[-1], shape[-2]) if source.transpose else shape


def _fill(
    checkpoint: Checkpoint,
    sources: Mapping[str, Source],
    targets: Mapping[LeafPath, Any],
    device: SingleDeviceSharding | None,
) -> dict[LeafPath, jax.Array]:
    """Path of a leaf -> its array."""
    filled: dict[LeafPath, jax.Array] = {}
    # The largest first: what a tensor takes in passing then comes on top of little.
    for name in sorted(sources, key=lambda name: -int(np.prod(checkpoint.shapes[name]))):
        source = sources[name]
        leaf = targets[source.path]
        stored = checkpoint.read(name)
        if stored.dtype not in _STORED_DTYPES:
            raise ValueError(f"{checkpoint.path}: tensor {name} is stored as {stored.dtype.name}, not as plain floats.")
        # float64 is narrowed here: JAX would do it with a warning.
        value = jax.device_put(stored.astype(np.float32) if stored.dtype == np.float64 else stored, device)
        if source.index or source.columns:
            stack = filled.pop(source.path, None)
            if stack is None:
                stack = jnp.zeros(leaf.shape, leaf.dtype, device=device)
            column = source.columns[0] if source.columns else 0
            filled[source.path] = _write_part(stack, value, source.index, column, transpose=source.transpose)
        else:
            filled[source.path] = _convert(value, dtype=leaf.dtype, transpose=source.transpose)
        # Without waiting, tensors would queue up in memory faster than the device takes them.
        jax.block_until_ready(filled[source.path])
    return filled


@functools.partial(jax.jit, static_argnames=("dtype", "transpose"))
def _convert(value: jax.Array, *, dtype: jnp.dtype, transpose: bool) -> jax.Array:
    """A copy: on the CPU `value` may be the mapped file itself."""
    return jnp.array(jnp.swapaxes(value, -1, -2) if transpose else value, dtype, copy=True)


@functools.partial(jax.jit, static_argnames=("transpose",), donate_argnames=("stack",))
def _write_part(
    stack: jax.Array, value: jax.Array, index: tuple[int, ...], column: int, *, transpose: bool
) -> jax.Array:
    """stack[*index, ..., column:] = value, in place."""
    value = (jnp.swapaxes(value, -1, -2) if transpose else value).astype(stack.dtype)
    start = (*index, *[0] * (value.ndim - 1), column)
    return jax.lax.dynamic_update_slice(stack, value.reshape((1,) * len(index) + value.shape), start)
