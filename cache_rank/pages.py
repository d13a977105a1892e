"""Which pages of the resident memory belong to which sequence, or to several."""

from __future__ import annotations

from collections.abc import Iterable

PAGE_TOKENS = 256
"""A page holds this many tokens, each with all its layers and KV heads."""


class OutOfPagesError(RuntimeError):
    """The resident memory is full; the inference rank reserves capacity, so it should not be."""


class PageAllocator:
    """Hands out page numbers [0, pages), and counts who holds each."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages))[::-1]
        self._holders = [0] * pages

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
        new = [self._free.pop() for _ in range(missing)]
        self.share(new)
        held.extend(new)

    def share(self, pages: Iterable[int]) -> None:
        """Count one holder more of each page."""
        for page in pages:
            self._holders[page] += 1

    def give_back(self, held: list[int]) -> None:
        """Take all pages out of `held`; those that nobody else holds are free."""
        for page in held:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)
        held.clear()
