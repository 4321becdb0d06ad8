"""Which request sits in which row of the device state, and on which pages."""

from collections.abc import Sequence

from jaxspec.pages import PagePool
from jaxspec.request import Request


class Rows:
    """Rows 0..num_rows - 1 and the pages of the requests in them. A row has at most one request."""

    def __init__(self, num_rows: int, pool: PagePool) -> None:
        self._pool = pool
        self._requests: list[Request | None] = [None] * num_rows

    @property
    def num_free(self) -> int:
        return self._requests.count(None)

    def has_room(self, num_tokens: int, shared: Sequence[int], growth: int) -> bool:
        """Whether a request of so many tokens, whose first pages may be shared, has room beside those in rows.

        They are left the pages for `growth` more tokens each, which they may need at the next dispatch: without that, a
        preempted request would be admitted, computed anew, and preempted again at once.
        """
        pool, more = self._pool, self._pool.pages_for(growth)
        held = [request for request in self._requests if request is not None]
        headroom = sum(min(more, pool.pages_for(request.max_len) - len(request.pages)) for request in held)
        taken = pool.pages_for(num_tokens) - len(shared) + pool.num_unowned(shared)
        return pool.num_free >= taken + headroom

    def take(self, request: Request, num_tokens: int, shared: Sequence[int] = ()) -> None:
        """Gives a request the lowest free row, and pages for `num_tokens` tokens, of which the first are shared.

        Raises:
            RuntimeError: it has a row, or there is no row or not that many pages.
        """
        if request.row is not None or request.pages:
            raise RuntimeError(f"request {request.id} already holds row {request.row} and pages {request.pages}.")
        self._pool.share(shared)
        request.pages = list(shared)
        if not self.num_free or not self.extend(request, num_tokens):
            raise RuntimeError(f"no row or no pages for request {request.id}: {self._state()}")
        request.row = self._requests.index(None)
        self._requests[request.row] = request

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Extends its pages to hold `num_tokens` tokens; False, and no change, when too few are free."""
        pages = self._pool.allocate(max(0, self._pool.pages_for(num_tokens) - len(request.pages)))
        if pages is None:
            return False
        request.pages += pages
        return True

    def release(self, request: Request) -> None:
        self._requests[self.row_of(request)] = None
        self._pool.free(request.pages)
        request.row, request.pages = None, []

    def row_of(self, request: Request) -> int:
        """Its row.

        Raises:
            RuntimeError: it has none, or another request sits there.
        """
        row = request.row
        if row is None or self._requests[row] is not request:
            raise RuntimeError(f"request {request.id} holds row {row}, which is not its own: {self._state()}")
        return row

    def check_holds(self, request: Request, num_tokens: int) -> None:
        """Raises RuntimeError if `num_tokens` tokens, which are or may be written, are more than its pages hold."""
        held = len(request.pages) * self._pool.page_size
        if held < num_tokens:
            raise RuntimeError(f"request {request.id} may write {num_tokens} tokens; its pages hold {held}.")

    def _state(self) -> str:
        rows = {row: request.id for row, request in enumerate(self._requests) if request is not None}
        return f"rows {rows} of {len(self._requests)}, {self._pool.num_free} of {self._pool.num_pages} pages free."
