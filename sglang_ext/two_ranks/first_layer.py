"""K and V that a model's first layer makes of tokens, which need nothing but these.

The cache rank does not hold them: with `--dense-layers 1` the first layer is not sparse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_ext.prediction import FORECAST_ARCHITECTURES
from sglang_ext.projections import decoder_layers

_TOKENS_AT_ONCE = 2048
"""So many tokens are embedded and projected at once."""


class FirstLayer:
    """Writes K and V of the first layer, by the model's own modules and its weights of today."""

    def __init__(self, model: torch.nn.Module, keys: Tensor, values: Tensor) -> None:
        """Find what makes them; the layer's buffers in the KV pool are (rows, Hkv, D).

        Raises:
            ValueError: the model is not known to be built so.
        """
        if type(model).__name__ not in FORECAST_ARCHITECTURES:
            raise ValueError(f"{type(model).__name__} is not {', '.join(FORECAST_ARCHITECTURES)}")
        layer = decoder_layers(model)[0]
        attention: Any = layer.module.self_attn
        self._embedding: Any = model.get_submodule("model.embed_tokens")
        self._norm, self._projection = layer.input_norm, layer.projection
        self._rotary, self._key_norm = attention.rotary_emb, getattr(attention, "k_norm", None)
        of_heads = keys[0].numel()
        self._widths = (layer.query_heads * layer.head_dim, of_heads, of_heads)
        self._keys, self._values = keys, values

    @torch.no_grad()
    def write(self, tokens: Sequence[int], pool_rows: Tensor, first: int = 0) -> None:
        """Write K and V of a prompt's tokens, from `first` on, into pool rows, (n,) int64."""
        for rows in pool_rows.split(_TOKENS_AT_ONCE):
            stop = first + len(rows)
            ids = torch.tensor(tokens[first:stop], dtype=torch.int64, device=rows.device)
            positions = torch.arange(first, stop, device=rows.device)
            projected, _ = self._projection(self._norm(self._embedding(ids)))
            queries, keys, values = (
                part.contiguous() for part in projected.split(self._widths, dim=-1)
            )
            if self._key_norm is not None:
                by_head = keys.view(-1, self._keys.shape[-1])
                keys = self._key_norm(by_head).view(keys.shape)
            _, keys = self._rotary(positions, queries, keys)
            for made, buffer in ((keys, self._keys), (values, self._values)):
                buffer.index_copy_(0, rows, made.view(-1, *buffer.shape[1:]))
            first = stop
