"""`--score-keys sketch`: scores read a sketch of the keys, whichever format holds the tokens.

Sketches are in pages as the tokens are, some 2 bits an element of a key beside what the format
takes. kernels/sketch/reference.py says what they are. What is shipped is what the format holds.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cache_rank.batch_metadata import BatchMetadata
from cache_rank.config import CacheRankConfig
from cache_rank.kernels.rows import Shipment
from cache_rank.kernels.score import score_workspace
from cache_rank.kernels.sketch import append_codes, load_codes, score_sketch
from cache_rank.kernels.sketch.reference import (
    Attended,
    Sketch,
    SketchShape,
    SketchWorkspace,
    make_sketch,
    sketch_shape,
    sketch_workspace,
)
from cache_rank.pages import PAGE_TOKENS


def shape_of(config: CacheRankConfig) -> SketchShape:
    return sketch_shape(config.model.head_dim, config.sketch_bits)


class KeySketches:
    """Sketches of the keys of all sequences, in as many pages as their tokens.

    Attributes:
        codes: (pages, layers, Hkv, PAGE_TOKENS, bytes of a sketch) uint8.
    """

    @classmethod
    def bytes_per_token(cls, config: CacheRankConfig) -> int:
        """Memory of a token's sketch alone."""
        model = config.model
        return model.layers * model.kv_heads * shape_of(config).bytes

    @classmethod
    def fixed_bytes(cls, config: CacheRankConfig) -> int:
        """Memory of the maps between keys, queries and codes."""
        model, shape = config.model, shape_of(config)
        elements = shape.channels * (model.head_dim + 1) + 4 * shape.bytes * model.head_dim
        return 4 * model.layers * model.kv_heads * elements

    def __init__(self, config: CacheRankConfig, pages: int, device: torch.device) -> None:
        """Take memory; what is encoded means nothing until `load_basis` has brought the bases."""
        model = config.model
        self._shape, self._config = shape_of(config), config
        pool = (pages, model.layers, model.kv_heads, PAGE_TOKENS, self._shape.bytes)
        self.codes = torch.empty(pool, dtype=torch.uint8, device=device)
        zeros = functools.partial(torch.zeros, dtype=torch.float32, device=device)
        heads = (model.layers, model.kv_heads)
        self._sketch = Sketch(
            zeros((*heads, self._shape.channels, model.head_dim)),
            zeros((*heads, self._shape.channels)),
            zeros((*heads, 4 * self._shape.bytes, model.head_dim)),
        )

    def load_basis(self, layer: int, basis: Tensor) -> None:
        """Take over the directions of a layer's keys, (Hkv, D + 1, D); see protocol.KeyBasis."""
        made = make_sketch(basis[None, :, :-1], basis[None, :, -1], self._shape)
        for own, part in zip(self._sketch, made, strict=True):
            own[layer] = part[0]

    def load(self, shipment: Shipment) -> None:
        """Encode the keys of a shipment."""
        load_codes(shipment, self.codes, self._sketch, self._shape)

    def append(self, rows: BatchMetadata, layers: range, up: Tensor) -> None:
        """Encode the keys of a message; see `Residency.append`."""
        model = self._config.model
        append_codes(
            up[:, :, model.query_heads : model.query_heads + model.kv_heads],
            self.codes,
            self._sketch,
            self._shape,
            rows.paged,
            layers.start,
        )

    def score(
        self,
        rows: BatchMetadata,
        layers: range,
        queries: Tensor,
        chosen: Tensor | None,
        workspace: SketchWorkspace,
        out: Tensor,
    ) -> None:
        """Score all resident tokens; see `Residency.score`."""
        attended = None
        if chosen is not None and self._config.score_normalizer == "attended":
            attended = Attended(chosen, self._config.sink_tokens, self._config.recent_tokens)
        score_sketch(
            queries,
            self.codes,
            self._sketch,
            self._shape,
            rows.paged,
            layers.start,
            self._config.model.scale,
            workspace,
            out,
            attended,
        )

    def score_workspace(self, rows: int, layers: int, capacity: int) -> SketchWorkspace:
        model = self._config.model
        sizes = (rows, layers, model.kv_heads, model.query_heads // model.kv_heads)
        scores = score_workspace(*sizes, capacity, self.codes.device)
        return sketch_workspace(scores, *sizes, self._shape)
