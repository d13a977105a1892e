"""The inference rank's side of the exchange: what a decode step sends to the cache rank, and gets.

Between CPUs (`host.py`) and between GPUs (`device/`) it has the same parts, see `base.py`:

    gate        where the forward pass meets the exchange, layer group by layer group
    exchange    one connection: announcements, prompts, counters, deadlines; between CPUs it sends,
                receives and writes into slots itself
    transfers   between GPUs queues that

An answer is applied before the attention of its layer group: between CPUs by the forward pass,
between GPUs as soon as it has come, on a stream for which the forward pass waits. With forecasts it
is applied in the step that asked for it, some groups later. The first groups, for which no hidden
state comes early enough, and all groups without forecasts get the answer in the next decode step,
so the cache rank has a whole step for it. `cache_rank/schedule.py` says which is which.
"""

from __future__ import annotations

from cache_rank.config import CacheRankConfig
from sglang_ext.two_ranks.exchange.base import Exchange, ExchangeCounters, Gate
from sglang_ext.two_ranks.exchange.connection import Connection
from sglang_ext.two_ranks.exchange.host import HostExchange, HostGate
from sglang_ext.two_ranks.exchange.pinned_ring import HostToDeviceRing
from sglang_ext.two_ranks.exchange.slots import SlotBuffers


def make_gate(config: CacheRankConfig, numbers: HostToDeviceRing | None) -> Gate:
    """Make the gate of this process, which outlives connections.

    Args:
        numbers: on a GPU, of which the gate reads `steps` and `exchanged`; None on a CPU.
    """
    if numbers is None:
        return HostGate()
    from sglang_ext.two_ranks.exchange.device.gate import DeviceGate

    return DeviceGate(config, numbers["steps"], numbers["exchanged"])


def make_exchange(
    connection: Connection,
    config: CacheRankConfig,
    slots: SlotBuffers,
    counters: ExchangeCounters,
    gate: Gate,
    chunk_tokens: int,
    coded_tokens: int,
) -> Exchange:
    """Begin the exchange over a connection, of the kind that the gate is of; see `Exchange`."""
    if isinstance(gate, HostGate):
        return HostExchange(connection, config, slots, counters, gate, chunk_tokens, coded_tokens)
    from sglang_ext.two_ranks.exchange.device.exchange import DeviceExchange
    from sglang_ext.two_ranks.exchange.device.gate import DeviceGate

    assert isinstance(gate, DeviceGate)
    return DeviceExchange(connection, config, slots, counters, gate, chunk_tokens, coded_tokens)
