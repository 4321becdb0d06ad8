"""Prompts that begin alike: the pages of an earlier request are taken over by a later one, and not computed again.

Two pages have one name if what is in them is the same. That depends on every token up to a page's end, and in the
draft's pool on one more: a head's last pair there is the feature of the page's last token with the token that follows.
So the name of page p, of pages of S tokens, is

    name(p) = hash(name(p - 1), tokens p * S .. (p + 1) * S)        the last one is the next page's first

and a page has a name only when that token is known. This leaves at least one token of any sequence to be computed,
which its first output is drawn from. Only pages that a prefill fills get names. What a round writes is the same but for
rounding, and a request's own pages should not depend on whether an earlier one's output happened to begin like it.
"""

import array
import hashlib
from collections.abc import Iterable, Sequence

from jaxspec.pages import PagePool
from jaxspec.request import Request

_DIGEST = 16


def extend_names(names: list[bytes], tokens: Sequence[int], page_size: int) -> None:
    """Appends the names that are missing; `names` are those of the first pages of these tokens."""
    for page in range(len(names), (len(tokens) - 1) // page_size):
        content = array.array("q", tokens[page * page_size : (page + 1) * page_size + 1]).tobytes()
        before = names[-1] if names else b""
        names.append(hashlib.blake2b(before + content, digest_size=_DIGEST).digest())


class Prefixes:
    """Finds and names the pages of requests.

    Args:
        pool: of the pages.
        is_on: nothing is found and nothing named otherwise.
    """

    def __init__(self, pool: PagePool, *, is_on: bool) -> None:
        self._pool, self._is_on = pool, is_on

    def find(self, request: Request, running: Iterable[Request]) -> list[int] | None:
        """The pages that a waiting request's sequence begins with.

        Returns:
            None where the next one is being computed for a running request: once that is planned, it can be shared.
        """
        if not self._is_on or request.awaits_prompt_logprobs:
            return []
        extend_names(request.page_names, request.sequence, self._pool.page_size)
        names = request.page_names
        if request.wants_prompt_logprobs:  # those that are not known yet come from computing the prompt itself
            names = names[: (len(request.prompt_logprobs) - 1) // self._pool.page_size]
        found = self._pool.find(names)
        missing = len(found)
        following = names[missing : missing + 1]
        is_coming = following and any(
            one.num_named <= missing and one.page_names[missing : missing + 1] == following for one in running
        )
        return None if is_coming else found

    def name(self, requests: Iterable[Request]) -> None:
        """Names pages whose prefill is planned, all of a batch: later dispatches may read them, and not this one."""
        for request in requests if self._is_on else ():
            end = min(request.prefilled // self._pool.page_size, len(request.page_names))
            for page in range(request.num_named, end):
                self._pool.keep(request.pages[page], request.page_names[page])
            request.num_named = end
