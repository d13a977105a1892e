"""What a format gives to the launches on tokens held as codes, and what its functions get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from cache_rank_kernels.coded.reference import CodedTokens


class Layout(NamedTuple):
    """Sizes that address pages and rings.

    Attributes:
        layers, kv_heads, head_dim: of the pages and rings.
        ring: entries of a slot's ring.
        page: tokens of a page.
        group_tokens: that are encoded together.
    """

    layers: int
    kv_heads: int
    head_dim: int
    ring: int
    page: int
    group_tokens: int

    @classmethod
    def of(cls, tokens: CodedTokens) -> Layout:
        """The layout of what is held, which is checked to be addressable by it."""
        _, layers, kv_heads, ring, head_dim = tokens.rings[0].shape
        assert all(ring.is_contiguous() for ring in tokens.rings)
        assert all(plane.is_contiguous() for planes in tokens.planes for plane in planes)
        return cls(layers, kv_heads, head_dim, ring, tokens.page_tokens, tokens.group_tokens)


class Own(NamedTuple):
    """What functions of a format take beside what all do.

    Attributes:
        tables: tensors and numbers, in a tuple.
        constants: that they are compiled for: what they read of it, by name.
    """

    tables: tuple[Any, ...]
    constants: NamedTuple


class Format(NamedTuple):
    """The part of the kernels that is a format's own.

    Attributes:
        encode: (planes, group, source, tables, OF_KEYS, LAYOUT, OWN) writes the codes of a group,
            that of the given index among the groups of (page, layer, kv head), whose tokens
            `load_group` reads from the source; 1 if they and their scales are all finite, else 0.
        gather: (planes, token, is_coded, message, tables, OF_KEYS, LAYOUT, OWN) passes the channels
            of some tokens, decoded, to `store_gathered` with the message. `token` is the index of
            each among the tokens of pages, (pages, layers, Hkv, P); not all are held as codes.
        logits: (planes, queries, pages, layer, head, start, coded, scale, logits, tables, GROUP,
            PADDED, STAGES, INTERPRETED, LAYOUT, OWN) passes the logits of the keys [start, coded)
            to `store_logits`. `queries` and `logits` are those of the unit.
        encoding: of tokens, what encode and gather take.
        scoring: of tokens, queries, scores to be written, whether to be exact, and options of the
            format: what logits takes.
        keys_as_values: encode is the same for both, and so is compiled once.
    """

    encode: Any
    gather: Any
    logits: Any
    encoding: Callable[[CodedTokens], Own]
    scoring: Callable[..., Own]
    keys_as_values: bool = False
