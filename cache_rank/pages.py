"""Which pages of the resident memory belong to which sequence."""

from __future__ import annotations

PAGE_TOKENS = 256
"""A page holds this many tokens, each with all its layers and KV heads."""


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

    def give_back(self, held: list[int]) -> None:
        """Take all pages out of `held`."""
        self._free.extend(held)
        held.clear()
