"""What a residency format gives to the launches on tokens held as codes, and what it gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from cache_rank.kernels.coded.reference import CodedTokens


class Layout(NamedTuple):
    """The sizes that kernels need to address pages and rings.

    Attributes:
        layers, kv_heads, head_dim: of the pages and of the rings.
        ring: how many tokens a slot's ring holds.
        page: how many tokens a page holds.
        group_tokens: how many tokens are encoded together.
        unfinished: see `CodedTokens`.
    """

    layers: int
    kv_heads: int
    head_dim: int
    ring: int
    page: int
    group_tokens: int
    unfinished: bool

    @classmethod
    def of(cls, tokens: CodedTokens) -> Layout:
        """The layout of what is held, which is checked to be contiguous."""
        _, layers, kv_heads, ring, head_dim = tokens.rings[0].shape
        assert all(ring.is_contiguous() for ring in tokens.rings)
        assert all(plane.is_contiguous() for planes in tokens.planes for plane in planes)
        sizes = layers, kv_heads, head_dim, ring, tokens.page_tokens, tokens.group_tokens
        return cls(*sizes, tokens.unfinished)


class Launch(NamedTuple):
    """How scores, or attention, are spread over a GPU; the result depends on it by rounding alone.

    Attributes:
        chunks: how many times CHUNK_TOKENS a program scores.
        warps, stages: of a program.
        registers: the most registers of a thread.
        ring_block: how many keys of the ring are multiplied at a time.
        programs: of attention, how many a multiprocessor runs at once.
    """

    chunks: int = 2
    warps: int = 4
    stages: int = 3
    registers: int | None = None
    ring_block: int = 64
    programs: int = 2


class Parameters(NamedTuple):
    """What the functions of a format take beside what those of all formats take.

    Attributes:
        tables: tensors and numbers, in a tuple.
        constants: what the functions are compiled for, if anything; they read it by name.
        launch: of scores or of attention.
    """

    tables: tuple[Any, ...] = ()
    constants: NamedTuple | None = None
    launch: Launch = Launch()


class Format(NamedTuple):
    """The functions of a format that are compiled into the kernels of all formats.

    All take `tables`, OF_KEYS (whether they deal with keys or with values), LAYOUT (a `Layout`) and
    CONSTANTS as far as they are listed here.

    Attributes:
        encode: (planes, group, source, tables, OF_KEYS, LAYOUT, CONSTANTS) writes the codes of the
            group of the given index among the groups of (page, layer, kv head). `load_group` reads
            its tokens from the source. Returns 1 if they and their scales are all finite, else 0.
        gather: (planes, token, target, tables, OF_KEYS, LAYOUT, CONSTANTS) decodes some tokens, and
            passes them to `store_gathered` with the target. `token` is the index of each among the
            tokens of pages, (pages, layers, Hkv, P); `target.is_coded` says which are codes.
        logits: (planes, queries, pages, layer, head, start, coded_stop, scale, logits, tables,
            GROUP, PADDED, STAGES, INTERPRETED, LAYOUT, CONSTANTS) passes the logits of the keys
            [start, coded_stop) to `store_logits`. `queries` and `logits` are those of the unit.
        encoding: makes the parameters of `encode` and of `gather` from the tokens.
        scoring: makes those of `logits` from the tokens, queries and scores to be written.
        keys_as_values: whether `encode` is the same for both, and so is compiled once.
        attend: (key_planes, value_planes, queries, pages, layer, head, start, stop, scale, GROUP,
            PADDED, STAGES, INTERPRETED, LAYOUT, CONSTANTS) attends to the tokens [start, stop), of
            whole groups unless `unfinished`. Returns sums of values by their weights, a tuple of
            `parts_of_words`, (channels, PADDED) each; the largest logit and the sum of weights,
            (PADDED,) each.
        attend_many: the same for more than the queries of a token, if there is a faster way.
        attending: makes the parameters of both from the tokens and PADDED. None if codes are only
            decoded.
    """

    encode: Any
    gather: Any
    logits: Any
    encoding: Callable[[CodedTokens], Parameters]
    scoring: Callable[[CodedTokens, Tensor, Tensor], Parameters]
    keys_as_values: bool = False
    attend: Any = None
    attend_many: Any = None
    attending: Callable[[CodedTokens, int], Parameters] | None = None
