"""Pages of prompts that the cache rank holds once, for all requests that have them.

The cache rank knows pages by names. This process gives them, and alone knows what they hold: a page
is found by the tokens up to its end. Pages are named once they are shipped, all of which is before
a request turns sparse. A request begins with the pages that it finds. If the next one is being
shipped by another request, it waits for that. What it finds nobody shipping, it ships itself.

Pages that no request has any more stay, until their room is needed: those first that were used
longest ago, and the end of a prompt before its beginning.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from cache_rank import residency
from cache_rank.config import CacheRankConfig
from cache_rank.measure.recording import RECORD_VARIABLE
from cache_rank.pages import PAGE_TOKENS
from sglang_ext import compat
from sglang_ext.flags import CacheRankFlags


@dataclasses.dataclass(slots=True, eq=False)
class SharedPage:
    """A page that has a name, and how many live sequences have it."""

    name: int
    users: int = 0


@dataclasses.dataclass(slots=True)
class SharedPrefix:
    """What a sequence shares.

    Attributes:
        keys: of the complete pages of its prompt, in order.
        pages: those among them that it has, the first ones.
        expected: how many pages it was expected to find when its room was reserved.
        began: whether it has taken what it found; else it waits.
        announced: whether the cache rank knows of it.
    """

    keys: list[bytes] = dataclasses.field(default_factory=list)
    pages: list[SharedPage] = dataclasses.field(default_factory=list)
    expected: int = 0
    began: bool = False
    announced: bool = False


class SharedPrompts:
    """The pages that have names, by content."""

    def __init__(self, tail_tokens: int) -> None:
        """Begin without any.

        Args:
            tail_tokens: what must be shipped beyond a page's end, see `residency.shared_tail`.
        """
        self._tail = tail_tokens
        self._pages: OrderedDict[bytes, SharedPage] = OrderedDict()
        self._shippers: dict[bytes, SharedPrefix] = {}
        self._dropped: list[int] = []
        self._unused = 0
        self._last_name = 0

    @property
    def tokens(self) -> int:
        """Tokens of all pages that have names."""
        return PAGE_TOKENS * len(self._pages)

    def keys_of(self, request: Any, length: int) -> list[bytes]:
        """Compute the keys of the complete pages of a request that has `length` tokens.

        Each is a hash of all tokens up to the page's end, and of what prefixes are kept apart by.
        A page is complete when its tail can be shipped, too: others may wait for it.
        """
        tokens = len(request.origin_input_ids) + len(request.output_ids)
        return _keys_of(request, max(0, min(length, tokens) - self._tail) // PAGE_TOKENS)

    def names_of(self, request: Any, stop: int, first: int = 0) -> list[int]:
        """Return the names of a request's pages that are there, from `first` on, before `stop`."""
        names = []
        for key in _keys_of(request, stop)[first:] if self._pages else ():
            if (page := self._pages.get(key)) is None:
                break
            names.append(page.name)
        return names

    def prefix_of(self, request: Any, length: int) -> SharedPrefix:
        """Look up how many pages of a request of `length` tokens are there, or being shipped."""
        keys = self.keys_of(request, length)
        known = (key in self._pages or key in self._shippers for key in keys)
        expected = next((index for index, found in enumerate(known) if not found), len(keys))
        return SharedPrefix(keys, expected=expected)

    def tokens_spared(self, pages: int) -> int:
        """Tokens that a request with so many pages of others need not hold itself."""
        copies = 1 if self._tail and pages else 0
        return PAGE_TOKENS * (pages - copies)

    def droppable(self, keys: Sequence[bytes] = ()) -> int:
        """Tokens of pages that no request has, but for those of `keys`."""
        spared = sum(key in self._pages and not self._pages[key].users for key in keys)
        return PAGE_TOKENS * (self._unused - spared)

    def drop(self, tokens: int, keys: Sequence[bytes] = ()) -> None:
        """Drop so many tokens of pages that no request has, but for those of `keys`."""
        if tokens <= 0:
            return
        spared = {*keys}
        for key, page in list(self._pages.items()):
            if tokens <= 0:
                return
            if not page.users and key not in spared:
                del self._pages[key]
                self._unused -= 1
                self._dropped.append(page.name)
                tokens -= PAGE_TOKENS

    def take_dropped(self) -> list[int]:
        """Return the names that the cache rank has yet to be told to drop."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def must_wait(self, prefix: SharedPrefix) -> bool:
        """Whether the first page that a prompt does not find is being shipped by another."""
        found = self.found(prefix)
        return found < len(prefix.keys) and prefix.keys[found] in self._shippers

    def take(self, prefix: SharedPrefix) -> list[int]:
        """Let a sequence have the pages that it finds, and ship the others; return their names."""
        prefix.began = True
        found = self.found(prefix)
        prefix.pages = [self._pages[key] for key in prefix.keys[:found]]
        for page in prefix.pages:
            self._unused -= not page.users
            page.users += 1
        for key in prefix.keys[found:]:
            self._shippers.setdefault(key, prefix)
        return [page.name for page in prefix.pages]

    def name_shipped(self, prefix: SharedPrefix, shipped: int) -> list[int]:
        """Name the pages that are complete when so many tokens are shipped; return the names."""
        first = len(prefix.pages)
        # Fewer tokens than the tail may be shipped.
        complete = min(max(0, shipped - self._tail) // PAGE_TOKENS, len(prefix.keys))
        named = []
        for key in prefix.keys[first:complete]:
            if key in self._pages or self._shippers.get(key) is not prefix:
                break  # the pages were forgotten meanwhile, and others have begun
            del self._shippers[key]
            self._last_name += 1
            page = SharedPage(self._last_name, users=1)
            self._pages[key] = page
            prefix.pages.append(page)
            named.append(page.name)
        return named

    def end(self, prefix: SharedPrefix) -> None:
        """Let go of what a sequence has, which was used just now."""
        for key in prefix.keys:
            if self._shippers.get(key) is prefix:
                del self._shippers[key]
        for key, page in reversed([*zip(prefix.keys, prefix.pages, strict=False)]):
            page.users -= 1
            if self._pages.get(key) is page:
                self._unused += not page.users
                self._pages.move_to_end(key)

    def clear(self) -> None:
        """Forget everything, as the cache rank does."""
        self._pages.clear()
        self._shippers.clear()
        self._dropped.clear()
        self._unused = 0

    def found(self, prefix: SharedPrefix) -> int:
        """How many of a prompt's first pages are there."""
        found = (index for index, key in enumerate(prefix.keys) if key not in self._pages)
        return next(found, len(prefix.keys))


def _keys_of(request: Any, pages: int) -> list[bytes]:
    """Compute the keys of a request's first pages, unless it has them: it asks again and again."""
    namespace = compat.prefix_namespace(request)
    keys: list[bytes]
    of_namespace, keys = getattr(request, "cache_rank_page_keys", (None, []))
    if of_namespace != namespace or len(keys) < pages:
        tokens = array("q", request.origin_input_ids) + array("q", request.output_ids)
        digest = hashlib.blake2b(repr(namespace).encode(), digest_size=16)
        keys = []
        for first in range(0, PAGE_TOKENS * pages, PAGE_TOKENS):
            digest.update(tokens[first : first + PAGE_TOKENS].tobytes())
            keys.append(digest.digest())
        request.cache_rank_page_keys = namespace, keys
    return keys[:pages]


def shared_prompts(args: CacheRankFlags, config: CacheRankConfig) -> SharedPrompts | None:
    """Make what prompts share on the cache rank; None where the format or the user does not share.

    A recording holds what each request has shipped, so nothing is shared while there is one.
    """
    tail = residency.shared_tail(config)
    # With working-set the radix cache is off for a reason that is none here.
    unwanted = args.disable_radix_cache and args.inference_kv == "full"
    if tail is None or unwanted or os.environ.get(RECORD_VARIABLE):
        return None
    return SharedPrompts(tail)
