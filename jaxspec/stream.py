"""The iterator that `LLM.stream` returns."""

from collections.abc import Callable, Iterator

from jaxspec.call import Call
from jaxspec.outputs import StreamChunk


class ChunkStream(Iterator[StreamChunk]):
    """The chunks of a call, made as they are asked for.

    Closing it, or dropping its last reference, aborts what is not finished, whether or not a chunk was ever taken.

    Args:
        call: whose chunks.
        advance: lets the engine run until it has something for some call.
        abort: ends what is not finished of the call.
        abandon: the same, at a time that suits the engine.
    """

    def __init__(
        self,
        call: Call,
        *,
        advance: Callable[[Call], None],
        abort: Callable[[Call], None],
        abandon: Callable[[Call], None],
    ):
        self._call: Call | None = call
        self._advance, self._abort, self._abandon = advance, abort, abandon

    def __next__(self) -> StreamChunk:
        try:
            while (call := self._call) is not None:
                is_done = call.is_done  # before looking for chunks: another thread may be adding the last ones
                if call.ready:
                    return call.ready.popleft()
                if call.error is not None:
                    raise call.error
                if is_done:
                    break
                self._advance(call)
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def poll(self) -> list[StreamChunk]:
        """The chunks that are there by now, made by steps that ran for other streams; nothing runs for them."""
        chunks: list[StreamChunk] = []
        while self._call is not None and self._call.ready:
            chunks.append(self._call.ready.popleft())
        return chunks

    def close(self) -> None:
        """Aborts what is not finished; no more chunks come."""
        if self._call is not None:
            self._abort(self._call)
            self._call = None

    def __del__(self) -> None:
        if self._call is not None:
            self._abandon(self._call)
