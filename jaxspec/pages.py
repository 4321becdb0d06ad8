"""The pages of the KV pools: who owns them, and which of them keep what is in them for whoever begins alike.

A page holds `page_size` tokens. It is free, or owned by one request, or by several that read it. One whose content has
a name (`keep`) stays behind when its last owner leaves, until it is shared again or its room is needed: the page that
was unused for longest is given away first.
"""

import heapq
from collections.abc import Iterable, Sequence


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
        self._owners = [0] * num_pages
        self._names: dict[int, bytes] = {}  # by page
        self._pages: dict[bytes, int] = {}  # by name
        self._kept: dict[int, None] = {}  # pages that have a name and no owner, the longest unused first

    @property
    def num_free(self) -> int:
        """Pages that no request owns, kept ones among them."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Pages that no request owns and whose content may be shared again."""
        return len(self._kept)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` pages, or none at all: None when fewer are free. Kept ones go last, and lose their content.

        Raises:
            RuntimeError: a free page has an owner, which is a bug.
        """
        if count > self.num_free:
            return None
        pages = [heapq.heappop(self._free) if self._free else self._evict() for _ in range(count)]
        for page in pages:
            if self._owners[page]:
                raise RuntimeError(
                    f"page {page} was handed out twice; {self.num_free} of {self.num_pages} pages are free."
                )
            self._owners[page] = 1
        return pages

    def find(self, names: Iterable[bytes]) -> list[int]:
        """The pages with these names, up to the first that there is none of; they are not taken yet."""
        found: list[int] = []
        for name in names:
            page = self._pages.get(name)
            if page is None:
                break
            found.append(page)
        return found

    def share(self, pages: Iterable[int]) -> None:
        """Takes pages that `find` gave: one more owner each, who reads and never writes them."""
        for page in pages:
            self._kept.pop(page, None)
            self._owners[page] += 1

    def num_unowned(self, pages: Iterable[int]) -> int:
        """How many of the pages have no owner: sharing them leaves so many fewer free."""
        return sum(page in self._kept for page in pages)

    def keep(self, page: int, name: bytes) -> None:
        """Names the content of an owned page, which must not change any more; a name that is taken stays where it is.

        Raises:
            RuntimeError: the page has no owner, or another name.
        """
        if not self._owners[page] or self._names.get(page, name) != name:
            raise RuntimeError(f"page {page} has {self._owners[page]} owners and is to be named anew.")
        if name not in self._pages:
            self._pages[name], self._names[page] = page, name

    def free(self, pages: Sequence[int]) -> None:
        """Gives pages of one request back, in the order of its tokens; the last ones are given away before the first.

        Raises:
            RuntimeError: a page is free already or is not of this pool; pages behind it are freed.
        """
        for page in reversed(pages):
            if not 0 <= page < self.num_pages:
                raise RuntimeError(f"page {page} is not of this pool, which has pages 0..{self.num_pages - 1}.")
            if not self._owners[page]:
                raise RuntimeError(f"page {page} was freed twice; {self.num_free} of {self.num_pages} pages are free.")
            self._owners[page] -= 1
            if self._owners[page]:
                continue
            if page in self._names:
                self._kept[page] = None
            else:
                heapq.heappush(self._free, page)

    def _evict(self) -> int:
        """The page that was unused for longest; it loses its name."""
        page = next(iter(self._kept))
        del self._kept[page]
        del self._pages[self._names.pop(page)]
        return page
