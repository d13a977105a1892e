"""Pages that have a name: on the device, or on the host while no sequence has them.

The inference rank gives the names and says which pages are to go. Where room is missing meanwhile,
pages that no sequence has move to the host, those first that were used longest ago. A page comes
back when a sequence begins with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from cache_rank.pages import PageAllocator


class HostTier:
    """Copies of pages in the host's memory, which is pinned for a GPU.

    All copies are queued on a stream of their own, behind what the current stream has queued. What
    it queues next waits for them. So neither copy of a page is written while it is read.
    """

    def __init__(self, memory: Sequence[Tensor], pages: int) -> None:
        """Take room for so many pages.

        Args:
            memory: what a page consists of, by page, (pages of the device, ...) each.

        Raises:
            ValueError: the host's memory cannot be pinned.
        """
        self._device = memory
        self._host = [_pinned((pages, *part.shape[1:]), part) for part in memory]
        self._free = list(range(pages))[::-1]
        self._places: dict[int, int] = {}
        on_gpu = bool(memory) and memory[0].is_cuda
        self._stream = torch.cuda.Stream(memory[0].device) if on_gpu else None

    def __contains__(self, name: int) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def free(self) -> int:
        """How many pages more have room."""
        return len(self._free)

    def put(self, name: int, page: int) -> None:
        """Copy a page of the device, while there is room."""
        place = self._places[name] = self._free.pop()
        self._copy(self._device, page, self._host, place)

    def read(self, name: int, page: int) -> None:
        """Write the page of this name to one of the device."""
        self._copy(self._host, self._places[name], self._device, page)

    def drop(self, name: int) -> None:
        """Forget the page of this name."""
        self._free.append(self._places.pop(name))

    def _copy(self, sources: Sequence[Tensor], at: int, targets: Sequence[Tensor], to: int) -> None:
        if self._stream is None:
            for source, target in zip(sources, targets, strict=True):
                target[to].copy_(source[at])
            return
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for source, target in zip(sources, targets, strict=True):
                target[to].copy_(source[at], non_blocking=True)
        current.wait_stream(self._stream)


def _pinned(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Allocate host memory; torch's own pinned memory would take the next power of two."""
    memory = torch.empty(shape, dtype=like.dtype)
    if like.is_cuda and memory.nbytes:
        error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(error):
            raise ValueError(
                f"{memory.nbytes / 1e9:.1f} GB of the host cannot be pinned ({error}): lower "
                "--cache-rank-host-gb"
            )
    return memory


class NamedPages:
    """All pages that have a name, in the order of their last use.

    `take` finds room as long as the inference rank keeps its accounts (`Lifecycle`). What sequences
    will have at their end fits on the device. Together with the pages that no sequence has, it fits
    on the device and the host. Each sequence may leave one page almost empty beyond that.
    """

    def __init__(self, pages: PageAllocator, host: HostTier) -> None:
        self._pages = pages
        self._host = host
        self._on_device: dict[int, int] = {}

    def __contains__(self, name: int) -> bool:
        return name in self._on_device or name in self._host

    def __iter__(self) -> Iterator[int]:
        yield from self._on_device
        yield from self._host

    def __len__(self) -> int:
        return len(self._on_device) + len(self._host)

    @property
    def on_host(self) -> int:
        """How many of the pages lie on the host."""
        return len(self._host)

    @property
    def unused(self) -> int:
        """How many of the pages no sequence has."""
        return self.on_host + sum(map(self._is_unused, self._on_device))

    def name(self, names: Sequence[int], pages: Sequence[int]) -> None:
        """Name pages, and hold them."""
        self._pages.share(pages)
        self._on_device.update(zip(names, pages, strict=True))

    def use(self, names: Sequence[int]) -> list[int]:
        """Return the pages of these names, on the device, with one holder more.

        The end of a prompt counts as used before its beginning.
        """
        for name in reversed(names):
            if name in self._on_device:
                self._on_device[name] = self._on_device.pop(name)
                self._pages.share([self._on_device[name]])
        for name in reversed(names):
            if name in self._host:
                (page,) = self.take(1)
                self._host.read(name, page)
                self._host.drop(name)
                self._on_device[name] = page
                self._pages.share([page])
        return [self._on_device[name] for name in names]

    def read(self, name: int, spare: int) -> int:
        """Return a page with the tokens of this name: its own, or the spare one."""
        if name in self._on_device:
            return self._on_device[name]
        self._host.read(name, spare)
        return spare

    def take(self, count: int) -> list[int]:
        """Take pages without a name, if need be in place of some that no sequence has.

        Raises:
            OutOfPagesError: all have a name or a sequence, and those without one do not fit into
                the host's memory.
        """
        while self._pages.free < count and self._host.free:
            unused = next(filter(self._is_unused, self._on_device), None)
            if unused is None:
                break
            self._host.put(unused, self._on_device[unused])
            self._pages.give_back([self._on_device.pop(unused)])
        return self._pages.take(count)

    def drop(self, names: Collection[int]) -> None:
        """Let pages of these names go, but for those that sequences have."""
        for name in names:
            if name in self._host:
                self._host.drop(name)
            else:
                self._pages.give_back([self._on_device.pop(name)])

    def _is_unused(self, name: int) -> bool:
        return self._pages.holders(self._on_device[name]) == 1
