"""Tokens that cannot be held: the device notes where they came, the host reports it later."""

from __future__ import annotations

import torch
from torch import Tensor

from cache_rank.config import ModelShape
from cache_rank.copies import Readback


class NotFinite:
    """Remembers where tokens came that are not finite, or span more than float32.

    Attributes:
        flags: (flags,) int32, written on the device; 0, or 1 + (part · layers + layer) · Hkv + head
            of such a token, with part 0 for keys and 1 for values. Streams that write at the same
            time need a flag each, unless they write atomically.
    """

    def __init__(self, model: ModelShape, device: torch.device, flags: int = 1) -> None:
        self.flags = torch.zeros(flags, dtype=torch.int32, device=device)
        self._model = model
        places = 2 * model.layers * model.kv_heads
        self._places = torch.arange(1, places + 1, dtype=torch.int32, device=device)
        self._places = self._places.view(2, model.layers, model.kv_heads)
        self._found = Readback()
        self._found.start(self.flags)

    def note(self, flag: int, layers: range, refused: Tensor) -> None:
        """Note on the current stream what was refused, (2, len(layers), Hkv) bool, K and V."""
        found = (self._places[:, layers.start : layers.stop] * refused).amax()
        torch.maximum(self.flags[flag], found, out=self.flags[flag])

    def check(self, wait: bool = False) -> None:
        """Report what was found; on a GPU, some steps later, or wait for what is queued.

        Raises:
            ValueError: some token cannot be held; the message names its layer and kv head.
        """
        place = self._read(wait)
        if place == 0:
            self._found.start(self.flags)
            place = self._read(wait)
        if not place:
            return
        layer, head = divmod(place - 1, self._model.kv_heads)
        part, layer = divmod(layer, self._model.layers)
        raise ValueError(
            f"{('keys', 'values')[part]} of layer {layer}, kv head {head} are not finite, or span "
            "more than float32"
        )

    def _read(self, wait: bool) -> int | None:
        """The largest flag; None while it is under way."""
        flags = self._found.wait() if wait else self._found.value()
        return None if flags is None else int(flags.max())
