"""Which pages of the resident memory belong to which sequence."""

from __future__ import annotations

PAGE_TOKENS = 256
"""Tokens of a page. All layers and kv heads of a token are on the same page."""

ROLLBACK_TOKENS = 32
"""How many fewer tokens than it ever held a sequence can be truncated to.

Speculative decoding appends a few drafted tokens a step and takes back those that are rejected.
Formats keep what they need for so many, in full precision: more would cost memory in every slot.
"""


class OutOfPagesError(RuntimeError):
    """The resident memory is full; the inference rank reserves capacity, so it should not be."""


class PageAllocator:
    """Hands out page numbers [0, pages)."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages))[::-1]

    @property
    def free(self) -> int:
        """How many pages nobody has."""
        return len(self._free)

    def extend(self, held: list[int], tokens: int) -> None:
        """Add pages to `held` until they hold `tokens` tokens.

        Raises:
            OutOfPagesError: too few are free; `held` is as before.
        """
        missing = -(-tokens // PAGE_TOKENS) - len(held)
        if missing > len(self._free):
            raise OutOfPagesError(f"{missing} pages wanted, {len(self._free)} free")
        held.extend(self._free.pop() for _ in range(missing))

    def shrink(self, held: list[int], tokens: int) -> None:
        """Take the pages out of `held` that its first `tokens` tokens do not need."""
        needed = -(-tokens // PAGE_TOKENS)
        self._free.extend(held[needed:])
        del held[needed:]

    def give_back(self, held: list[int]) -> None:
        """Take all pages out of `held`."""
        self.shrink(held, 0)
