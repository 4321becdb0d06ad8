"""The free pages of the KV pools; a page holds `page_size` tokens and has one owner at a time."""

import heapq
from collections.abc import Iterable


class PagePool:
    """Hands out page numbers 0..num_pages - 1, lowest first.

    Raises:
        ValueError: `num_pages` or `page_size` is below 1.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        for name, value in {"num_pages": num_pages, "page_size": page_size}.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1; set it higher.")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages))  # a heap; ascending already
        self._is_free = [True] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` pages, or none at all: None when fewer are free.

        Raises:
            RuntimeError: a free page has an owner, which is a bug.
        """
        if count > len(self._free):
            return None
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            if not self._is_free[page]:
                raise RuntimeError(
                    f"page {page} was handed out twice; {self.num_free} of {self.num_pages} pages are free."
                )
            self._is_free[page] = False
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Gives pages back.

        Raises:
            RuntimeError: a page is free already or is not of this pool; pages before it are freed.
        """
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise RuntimeError(f"page {page} is not of this pool, which has pages 0..{self.num_pages - 1}.")
            if self._is_free[page]:
                raise RuntimeError(f"page {page} was freed twice; {self.num_free} of {self.num_pages} pages are free.")
            self._is_free[page] = True
            heapq.heappush(self._free, page)
