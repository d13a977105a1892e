"""Both ends of transfers, on a socket of this machine."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor
from waiting import wait_until

from sglang_ext.disaggregation.arriving import Arrival
from sglang_ext.disaggregation.codec import HostPages, PageCodec, PoolRows
from sglang_ext.disaggregation.departing import Departure, Listener
from sglang_ext.disaggregation.wire import Hello, Wire, link_of_environment

LAYERS, HEADS, WIDTH, ROWS = 3, 2, 64, 3000
SECRET, METADATA = b"s" * 64, bytes(range(48))


def make_pool(seed: int, dtype: torch.dtype = torch.float32) -> PoolRows:
    torch.manual_seed(seed)
    keys, values = (
        [torch.randn(ROWS, HEADS, WIDTH).to(dtype) for _ in range(LAYERS)] for _ in range(2)
    )
    return PoolRows(keys, values)


class Servers:
    """Both ends of transfers, without SGLang around them."""

    def __init__(self) -> None:
        self.prefill, self.decode = make_pool(0), make_pool(1)
        self.pages = HostPages(False), HostPages(False)
        self.listener = Listener("127.0.0.1", SECRET)
        self.listener.why_not = lambda hello: None
        self.link = link_of_environment()
        self.passed_on: list[tuple[Tensor, PageCodec, Tensor]] = []
        self.written: list[Tensor] = []
        self.peer = self.listener.address, self.listener.port
        self.asked_again: deque[tuple[str, int] | None] = deque()

    def begin(
        self,
        room: int,
        rows: Tensor,
        codes: str = "bf16",
        secret: bytes = SECRET,
        in_parts: bool = False,
    ) -> tuple[Departure, Arrival]:
        arrival = self.arrive(room, rows, secret, in_parts)
        found: list[tuple[Hello, Wire]] = []

        def has_come() -> bool:
            found.extend(filter(None, [self.listener.take(room)]))
            return bool(found)

        wait_until(has_come, 5)
        hello, wire = found[0]
        of_process = self.prefill, self.pages[0], self.link
        return Departure(wire, *of_process, codes, hello.in_parts), arrival

    def arrive(
        self, room: int, rows: Tensor, secret: bytes = SECRET, in_parts: bool = False
    ) -> Arrival:
        hello = Hello(room, len(rows), self.decode.shape, [16, 32], in_parts)
        after: list[object] = []
        others = after, self._pass_on, self.written.append, self.asked_again.popleft
        return Arrival(self.decode, self.pages[1], self.peer, secret, hello, rows, *others)

    def _pass_on(self, rows: Tensor, codec: PageCodec, packed: Tensor) -> None:
        self.passed_on.append((rows, codec, packed.clone()))  # the memory is used again


def ends(arrival: Arrival, how: str, seconds: float = 8) -> None:
    wait_until(lambda: arrival.poll() != "coming", seconds)
    assert arrival.poll() == how, arrival.failure


def draw_rows(count: int, seed: int) -> Tensor:
    return torch.randperm(ROWS - 1, generator=torch.Generator().manual_seed(seed))[:count] + 1


def sent_in_chunks(departure: Departure, rows: Tensor, *chunks: int) -> None:
    for chunk in rows[: sum(chunks)].split(list(chunks)):
        departure.send(chunk, [], None)
    departure.send(rows[sum(chunks) :], [], METADATA)
