"""The paged cache: a commit writes the accepted path and nothing else, in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention import Block
from jaxspec.draft.base import DraftMethod
from jaxspec.draft.feature import Feature
from jaxspec.draft.ngram import Ngram
from jaxspec.draft.shape import TreeShape
from jaxspec.draft.standalone import Standalone
from jaxspec.kv_cache import Accepted, PagedKV, wait_for
from jaxspec.runner import Runner, RunnerShape
from jaxspec.step import Params, Program, compiled_steps
from tests.tiny import VOCAB, chain, tiny_head, tiny_model

NUM_LAYERS, NUM_KV, DIM = 2, 2, 4

commit = jax.jit(PagedKV.commit)


def numbered_pool(num_pages: int, page_size: int) -> PagedKV:
    """A pool whose every element is another number, so that any stray write shows."""
    shape = (NUM_LAYERS, num_pages, NUM_KV, page_size, DIM)
    numbers = -np.arange(np.prod(shape), dtype=np.float32).reshape(shape) - 1
    return PagedKV(jnp.asarray(numbers), jnp.asarray(numbers - 0.5))


def random_pending(num_rows: int, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (NUM_LAYERS, num_rows, num_nodes, NUM_KV, DIM)
    return rng.random(shape, np.float32) + 1, rng.random(shape, np.float32) + 3


def commit_by_hand(pool: PagedKV, pending, table, prefix_len, path, count) -> list[np.ndarray]:
    """One token at a time, in Python; a position without a page is left out."""
    pools = [np.array(leaf) for leaf in jax.tree.leaves(pool)]
    page_size = pools[0].shape[3]
    for row in range(len(prefix_len)):
        for step in range(count[row]):
            position = prefix_len[row] + step
            column = position // page_size
            if column < table.shape[1] and table[row, column] >= 0:
                for leaf, rows in zip(pools, pending):
                    leaf[:, table[row, column], :, position % page_size] = rows[:, row, path[row, step]]
    return pools


def check_commit(table, prefix_len, path, count, *, page_size: int, num_pages: int = 9, num_nodes: int = 5) -> None:
    table, prefix_len, path, count = (np.asarray(x, np.int32) for x in (table, prefix_len, path, count))
    pool, pending = numbered_pool(num_pages, page_size), random_pending(len(prefix_len), num_nodes)
    block = Block(jnp.zeros((len(prefix_len), num_nodes), jnp.int32), jnp.asarray(prefix_len), jnp.asarray(table))
    result = commit(pool, pending, block, Accepted(jnp.asarray(path), jnp.asarray(count)))
    expected = commit_by_hand(pool, pending, table, prefix_len, path, count)
    for leaf, wanted in zip(jax.tree.leaves(result), expected, strict=True):
        np.testing.assert_array_equal(leaf, wanted)


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_commit_writes_the_accepted_path_and_nothing_else(page_size):
    table = [[3, 7, 1, 4], [0, 5, 2, -1], [8, 6, -1, -1]]
    path = [[0, 2, 4, 4], [0, 1, 3, 3], [0, 0, 0, 0]]
    for prefix_len, count in (([0, 0, 0], [4, 1, 2]), ([3, 2, 1], [4, 3, 0]), ([1, 4, 2], [2, 4, 1])):
        check_commit(table, prefix_len, path, count, page_size=page_size)


def test_a_path_crosses_pages():
    check_commit([[4, 2, 6]], [3], [[0, 1, 2, 3]], [4], page_size=2)


def test_count_zero_writes_nothing():
    check_commit([[0, 1], [2, 3]], [0, 7], [[0, 1], [0, 1]], [0, 0], page_size=4)


def test_positions_without_a_page_are_dropped():
    """-1 must not reach the last page, nor a position behind the table the last column."""
    check_commit([[3, -1], [-1, -1]], [2, 0], [[0, 1, 2, 3], [0, 1, 2, 3]], [4, 4], page_size=4)
    check_commit([[3, 5]], [7], [[0, 1, 2, 3]], [4], page_size=4)


def test_a_row_of_padding_with_garbage_behind_its_count_writes_nothing():
    check_commit([[-1, -1], [1, 0]], [0, 500], [[4, 4], [3, 2]], [0, 0], page_size=4)


def test_waiting_leaves_the_count_as_it_is():
    np.testing.assert_array_equal(wait_for(jnp.array([3, 0, 5]), jnp.array([0, 7, VOCAB - 1])), [3, 0, 5])


TARGET = tiny_model(0, num_hidden_layers=1)


HEAD = tiny_head(1, fused=True, capture=(0,))
METHODS: dict[str, tuple[DraftMethod, tuple[jax.Array, ...]]] = {
    "ngram": (Ngram(chain(3), 1, 3), ()),
    "standalone": (Standalone(TARGET[0], chain(3), VOCAB), TARGET[1]),
    "feature": (Feature(HEAD[0], TreeShape(3, 2, 6)), HEAD[1]),
}


@pytest.mark.parametrize("name", METHODS)
def test_no_step_copies_a_pool(name):
    """The state is donated and every pool updated in place: a copy costs more than the step on a pool of real size."""
    network, leaves = TARGET
    method, draft_leaves = METHODS[name]
    program = Program(network, method, rounds=2, num_top_logprobs=4)
    runner = Runner(program, Params(leaves, draft_leaves), RunnerShape(2, 64, 4, 8192, 16, jnp.dtype("float32")))
    one_leaf = runner.state.caches[0].keys.nbytes
    prefill, decode = compiled_steps(program)
    rows, table = runner.empty_rows(2), runner.empty_table(2)
    for lowered in (
        decode.lower(runner.params, state=runner.state, row_ids=rows, table=table),
        prefill.lower(runner.params, state=runner.state, chunks=runner.empty_chunks(1, 16)),
    ):
        memory = lowered.compile().memory_analysis()
        assert memory.temp_size_in_bytes < one_leaf / 2
        assert memory.alias_size_in_bytes >= runner.cache_bytes()
    runner.close()
