"""Rows of the device state: taken, worked on and put back, with padding that reads something and writes nothing."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.state import Rows, Sampling, put, take

NUM_ROWS, PADDING = 5, 5


def numbered_rows() -> Rows:
    """Rows whose every element tells its row."""
    rows = Rows.zeros(NUM_ROWS, 8, 2)
    number = jnp.arange(NUM_ROWS)
    return jax.tree.map(lambda leaf: (leaf * 0 + number.reshape(-1, *[1] * (leaf.ndim - 1))).astype(leaf.dtype), rows)


def test_take_reads_the_named_rows_in_order():
    rows = numbered_rows()
    taken = take(rows, jnp.array([3, 0, 4]))
    np.testing.assert_array_equal(taken.seq_len, [3, 0, 4])
    np.testing.assert_array_equal(taken.history[:, 7], [3, 0, 4])
    np.testing.assert_array_equal(taken.sampling.seed[:, 1], [3, 0, 4])
    for leaf, whole in zip(jax.tree.leaves(taken), jax.tree.leaves(rows), strict=True):
        assert leaf.shape == (3, *whole.shape[1:])
        assert leaf.dtype == whole.dtype


def test_put_writes_the_named_rows_and_drops_padding():
    rows = numbered_rows()
    new = jax.tree.map(lambda leaf: jnp.ones((4, *leaf.shape[1:]), leaf.dtype), rows)
    result = put(rows, jnp.array([PADDING, 2, PADDING, 0]), new)
    for leaf, before in zip(jax.tree.leaves(result), jax.tree.leaves(rows), strict=True):
        expected = np.array(before)
        expected[[0, 2]] = 1
        np.testing.assert_array_equal(leaf, expected)
        assert leaf.dtype == before.dtype


def test_put_undoes_take_whatever_the_padding():
    rows = numbered_rows()
    row_ids = jnp.array([PADDING, 4, 1, PADDING])
    taken = take(rows, row_ids)
    for leaf, before in zip(jax.tree.leaves(put(rows, row_ids, taken)), jax.tree.leaves(rows), strict=True):
        np.testing.assert_array_equal(leaf, before)


def test_history_is_written_from_start_for_count_tokens():
    rows = Rows.zeros(3, 6, 1)._replace(history=jnp.full((3, 6), -7, jnp.int32))
    tokens = jnp.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    written = rows.write_history(tokens, start=jnp.array([0, 4, 3]), count=jnp.array([2, 3, 0])).history
    # Row 1 would pass the end: what does not fit is dropped.
    expected = [[1, 2, -7, -7, -7, -7], [-7, -7, -7, -7, 4, 5], [-7] * 6]
    np.testing.assert_array_equal(written, expected)


def test_a_fresh_row_is_inactive_and_greedy_with_every_mask_off():
    rows, sampling = Rows.zeros(2, 4, 3), Sampling.zeros(2, 3)
    assert not rows.active.any()
    np.testing.assert_array_equal(sampling.temperature, 0)
    np.testing.assert_array_equal(sampling.top_p, 1)
    np.testing.assert_array_equal(sampling.stop_ids, -1)
    # A weak type would compile every step twice.
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(rows))
