"""Pages have one owner at a time."""

import random

import pytest

from jaxspec.pages import PagePool


def test_allocates_lowest_first_and_all_or_nothing():
    pool = PagePool(5, 16)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(0) == []
    pool.free([0])
    assert pool.allocate(2) == [0, 2]


def test_pages_for_rounds_up():
    pool = PagePool(4, 16)
    assert [pool.pages_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_double_free_and_foreign_pages_are_errors():
    pool = PagePool(3, 4)
    pages = pool.allocate(2)
    assert pages is not None
    pool.free(pages)
    with pytest.raises(RuntimeError, match="page 0 was freed twice; 3 of 3"):
        pool.free([0])
    for page in (3, -1):
        with pytest.raises(RuntimeError, match=f"page {page} is not of this pool"):
            pool.free([page])


def test_a_page_that_is_free_twice_is_noticed():
    pool = PagePool(2, 4)
    pool._free.append(0)
    with pytest.raises(RuntimeError, match="page 0 was handed out twice"):
        pool.allocate(2)


def test_a_named_page_stays_until_its_room_is_needed():
    pool = PagePool(4, 4)
    first, second = pool.allocate(2) or [], pool.allocate(1) or []
    for page, name in zip([*first, *second], (b"a", b"b", b"c")):
        pool.keep(page, name)
    pool.free(first)
    pool.free(second)
    assert (pool.num_free, pool.num_kept) == (4, 3)
    assert pool.find([b"a", b"b", b"d", b"c"]) == first
    pool.share(pool.find([b"a"]))
    assert (pool.num_free, pool.num_kept, pool.num_unowned(first)) == (3, 2, 1)
    # The page without a name first; then the end of the sequence that was given back first, and never one in use.
    assert pool.allocate(3) == [3, 1, 2]
    assert pool.find([b"b"]) == pool.find([b"c"]) == []
    assert pool.find([b"a"]) == [0]
    assert pool.allocate(1) is None
    pool.free([0])
    assert pool.allocate(1) == [0]
    assert pool.find([b"a"]) == []


def test_a_shared_page_is_free_when_its_last_owner_leaves():
    pool = PagePool(2, 4)
    pages = pool.allocate(1) or []
    pool.keep(pages[0], b"a")
    pool.share(pages)
    pool.free(pages)
    assert pool.num_free == 1
    pool.free(pages)
    assert (pool.num_free, pool.num_kept) == (2, 1)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.free(pages)


def test_a_name_belongs_to_one_page_and_a_page_to_one_name():
    pool = PagePool(3, 4)
    one, other = pool.allocate(2) or []
    pool.keep(one, b"a")
    pool.keep(one, b"a")
    pool.keep(other, b"a")
    assert pool.find([b"a"]) == [one]
    pool.free([other])
    assert pool.num_kept == 0
    with pytest.raises(RuntimeError, match="to be named anew"):
        pool.keep(one, b"b")
    with pytest.raises(RuntimeError, match="0 owners"):
        pool.keep(2, b"b")


def test_random_use_never_hands_a_page_out_twice():
    rng, pool, owned = random.Random(0), PagePool(20, 4), []
    for _ in range(2000):
        if owned and rng.random() < 0.5:
            pool.free(owned.pop(rng.randrange(len(owned))))
        elif pages := pool.allocate(rng.randint(1, 5)):
            owned.append(pages)
        held = [page for pages in owned for page in pages]
        assert len(set(held)) == len(held) == 20 - pool.num_free


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_empty_pools_are_refused(sizes):
    with pytest.raises(ValueError, match="must be at least 1"):
        PagePool(*sizes)
