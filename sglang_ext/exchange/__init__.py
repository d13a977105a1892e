"""The inference rank's side of the exchange: what a decode step sends to the cache rank, and gets.

Between CPUs and between GPUs it has the same three parts, in `host/` and in `device/`:

    gate        where the forward pass meets the exchange, layer group by layer group
    transfers   what is sent, received and written into slots, for one connection
    exchange    the host's accounts of it: announcements, counters, deadlines

The answer to step t for a layer group is applied just before that group's attention in the next
decode step, so that the cache rank has a whole step for each group.
"""

from __future__ import annotations

from torch import Tensor

from cache_rank.config import CacheRankConfig
from sglang_ext.exchange.base import Exchange, Gate
from sglang_ext.exchange.connection import Connection
from sglang_ext.exchange.host.exchange import HostExchange
from sglang_ext.exchange.host.gate import HostGate
from sglang_ext.exchange.slots import SlotBuffers


def make_gate(config: CacheRankConfig, steps: Tensor | None, exchanged: Tensor | None) -> Gate:
    """Make the gate of this process, which outlives connections.

    Args:
        config: agreed with the cache rank.
        steps: (2,) int64 on a GPU, see `DeviceGate`; None on a CPU.
        exchanged: (max batch,) int64 on a GPU, see `DeviceGate`; None on a CPU.
    """
    if steps is None or exchanged is None:
        return HostGate()
    from sglang_ext.exchange.device.gate import DeviceGate

    return DeviceGate(config, steps, exchanged)


def make_exchange(
    connection: Connection, config: CacheRankConfig, slots: SlotBuffers, gate: Gate
) -> Exchange:
    """Begin the exchange over a connection, of the kind that the gate is of."""
    if isinstance(gate, HostGate):
        return HostExchange(connection, config, slots, gate)
    from sglang_ext.exchange.device.exchange import DeviceExchange
    from sglang_ext.exchange.device.gate import DeviceGate

    assert isinstance(gate, DeviceGate)
    return DeviceExchange(connection, config, slots, gate)
