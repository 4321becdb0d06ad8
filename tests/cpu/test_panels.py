"""The CPU's kernel: bitwise the same for any number of rows, and the product that XLA computes."""

import concurrent.futures
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cpu import register
from jaxspec.cpu.host import VectorUnit, vector_unit
from jaxspec.cpu.panels import Panels, pack, products
from jaxspec.cpu.register import why_not
from jaxspec.cpu.storage import STORAGES

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu" or why_not() is not None, reason=f"needs the CPU's kernel: {why_not()}"
)

MANY = (*range(1, 17), 31, 63, 64, 65, 130)
# K and N: single values, below and beyond a panel, odd ones, several chunks, and a length that fills one chunk.
SIZES = [(1, 1), (3, 5), (5, 32), (7, 33), (64, 47), (129, 31), (577, 193), (576, 1536), (2049, 70)]
# A chain of multiply-adds is the same code in every storage: what differs are the loads.
STORED_SIZES = [(*size, "float32") for size in SIZES]
STORED_SIZES += [(*size, dtype) for dtype in ("bfloat16", "int8") for size in ((7, 33), (577, 193))]


def random(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape), jnp.float32)


@jax.jit
def widened(weight: Panels) -> jax.Array:
    """The values that a weight stands for, float32 [K, N]."""
    return weight.columns(jnp.arange(weight.size_out)).T


@jax.jit
def product(x: jax.Array, weight: Panels) -> jax.Array:
    return products(x, [weight])[0]


@pytest.mark.parametrize(("length", "columns", "dtype"), STORED_SIZES)
def test_a_row_does_not_depend_on_how_many_it_is_computed_with(length, columns, dtype):
    x, weight = random(max(MANY), length), pack(random(length, columns), dtype=dtype)
    alone = np.concatenate([product(x[row : row + 1], weight) for row in range(max(MANY))])
    for rows in MANY:
        np.testing.assert_array_equal(product(x[:rows], weight), alone[:rows])


@pytest.mark.parametrize("dtype", STORAGES)
def test_random_shapes_are_bitwise_too(dtype):
    rng = np.random.default_rng(1)
    for _ in range(4):
        length, columns, rows = (int(rng.integers(1, top)) for top in (400, 400, 17))
        x, weight = random(rows, length), pack(random(length, columns), dtype=dtype)
        alone = np.concatenate([product(x[row : row + 1], weight) for row in range(rows)])
        np.testing.assert_array_equal(product(x, weight), alone)


@pytest.mark.parametrize(("length", "columns"), SIZES)
def test_it_is_the_product(length, columns):
    x, weight = random(9, length), random(length, columns)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    np.testing.assert_allclose(product(x, pack(weight)), exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())
    np.testing.assert_allclose(product(x, pack(weight)), x @ weight, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize(("length", "columns"), [(1, 1), (7, 33), (64, 47), (577, 193)])
def test_fewer_bits_give_what_float32_gives_with_the_values_that_they_stand_for(length, columns, dtype):
    x, weight = random(9, length), pack(random(length, columns), dtype=dtype)
    np.testing.assert_array_equal(product(x, weight), product(x, pack(widened(weight))))


def test_rounding_is_to_the_nearest_value():
    weight = random(70, 40).at[:, 3].set(0).at[32:, 5].multiply(1e-3)
    found = widened(pack(weight, dtype="bfloat16"))
    np.testing.assert_array_equal(found, weight.astype(jnp.bfloat16).astype(jnp.float32))
    found = np.asarray(widened(pack(weight, dtype="int8")))
    for group in range(0, 70, 32):  # rows of a column that share a scale: half a step of the largest one's 127
        part = np.asarray(weight)[group : group + 32]
        off = np.abs(found[group : group + 32] - part)
        assert np.all(off <= np.abs(part).max(axis=0) / 127 * 0.5001)
    np.testing.assert_array_equal(found[:, 3], 0)


def test_rows_of_a_rounded_table_are_the_columns_of_its_transpose():
    table, ids = random(71, 40), jnp.array([[0, 70], [33, 5]])
    packed = pack(table, axis=-2, dtype="int8")
    assert packed.panels.dtype == "int8"
    expected = np.asarray(widened(pack(table.T, dtype="int8"))).T[np.asarray(ids)]
    np.testing.assert_array_equal(jax.jit(Panels.columns)(packed, ids), expected)


def test_each_sum_is_a_chain_in_the_order_of_k():
    """What makes rows independent, and what another host's vectors must give as well."""
    x, weight = random(2, 301), random(301, 37)
    total = np.zeros((2, 37), np.float32)
    for k in range(301):
        # The product of two float32 is exact in float64: one rounding, as in a fused multiply-add.
        step = np.asarray(x[:, k, None], np.float64) * np.asarray(weight[k], np.float64) + total
        total = step.astype(np.float32)
    found = np.asarray(product(x, pack(weight)))
    # Rounding to float64 in between can only matter in ties: nearly all are equal, and none is far.
    assert np.mean(found == total) > 0.99
    np.testing.assert_allclose(found, total, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", STORAGES)
def test_several_weights_of_one_x_give_what_each_gives(dtype):
    x = random(2, 3, 96)
    weights = [pack(random(96, columns, seed=columns), dtype=dtype) for columns in (64, 1, 33)]
    together = jax.jit(products)(x, weights)
    for weight, y in zip(weights, together, strict=True):
        assert y.shape == (2, 3, weight.size_out)
        np.testing.assert_array_equal(y.reshape(6, -1), product(x.reshape(6, -1), weight))


def test_a_table_is_cut_along_its_rows_and_read_by_them():
    table, ids = random(71, 40), jnp.array([[0, 70], [33, 5]])
    packed, turned = pack(table, axis=-2), pack(table.T)
    np.testing.assert_array_equal(packed.panels, turned.panels)
    np.testing.assert_array_equal(packed.columns(ids), table[ids])


@pytest.mark.parametrize("dtype", STORAGES)
def test_stacked_layers_are_cut_one_by_one(dtype):
    stack = random(3, 40, 45)
    for together, alone in zip(pack(stack, dtype=dtype).arrays, pack(stack[1], dtype=dtype).arrays, strict=True):
        np.testing.assert_array_equal(together[1], alone)


def test_many_threads_may_call_at_once():
    """Calls share XLA's pool: a busy one must not hold up a call, nor mix up its results."""
    x, weight = random(4, 512), pack(random(512, 2048))
    expected = np.asarray(product(x, weight))

    def call(_: int) -> bool:
        return all(np.array_equal(product(x, weight), expected) for _ in range(20))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(8)))


def test_an_unknown_interface_is_named(monkeypatch):
    monkeypatch.setattr(register.Version, "MAJOR", 7)
    assert "foreign function interface 7.3, and this is 0." in str(why_not())


# Vectors of other hosts, which this one computes with too: NEON's, AVX2's, and those of a host without fused steps.
UNITS = {"4 lanes": (4, 32, True), "8 lanes": (8, 16, True), "unfused": (8, 16, False)}


@pytest.mark.parametrize("dtype", STORAGES)
@pytest.mark.parametrize("name", UNITS)
def test_other_vectors_give_bitwise_rows_and_the_same_sums(name, dtype, monkeypatch):
    lanes, num_registers, has_fma = UNITS[name]
    x, weight = random(13, 147), random(147, 75)
    own = product(x, pack(weight, dtype=dtype))
    host = vector_unit()
    assert host is not None
    unit = dataclasses.replace(host, lanes=lanes, num_registers=num_registers, has_fma=has_fma)
    monkeypatch.setattr(register, "vector_unit", lambda: unit)
    packed = pack(weight, dtype=dtype)
    other = jax.jit(lambda x: products(x, [packed])[0])
    found = other(x)
    np.testing.assert_array_equal(found, np.concatenate([other(x[row : row + 1]) for row in range(13)]))
    if has_fma == host.has_fma:
        np.testing.assert_array_equal(found, own)
    else:
        np.testing.assert_allclose(found, own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", UNITS)
def test_every_vector_unit_has_room_for_a_block_of_rows(name):
    lanes, num_registers, has_fma = UNITS[name]
    unit = VectorUnit(lanes=lanes, num_registers=num_registers, has_fma=has_fma, pause="pause")
    assert unit.row_block >= 4
    assert unit.panel_vectors * (unit.row_block + 1) + 1 <= num_registers
