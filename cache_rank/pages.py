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

    def holders(self, page: int) -> int:
        """How many hold a page."""
        return self._holders[page]

    def take(self, count: int) -> list[int]:
        """Hand out so many pages.

        Raises:
            OutOfPagesError: too few are free.
        """
        if count > len(self._free):
            raise OutOfPagesError(f"{count} pages wanted, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        self.share(pages)
        return pages

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
