"""Floating-point operations of decoding one token (AsyncSpade, arXiv 2510.07486, Appendix B).

An operation is a multiplication or an addition, of one sequence. The equations count the linear
layers and attention; they leave out the embedding, the output projection, norms and softmax. What
a cache rank computes is not in its system's count: see `scoring`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

QUEST_PAGE = 16
"""A page of Quest has so many tokens: P in Eq. 9."""


class ModelSize(msgspec.Struct, frozen=True):
    """The sizes of a decoder with grouped-query attention and a gated feed-forward network."""

    layers: int  # l
    hidden: int  # H
    query_heads: int  # q
    kv_heads: int  # kv
    head_dim: int  # h
    intermediate: int  # i, of the feed-forward network

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> ModelSize:
        """Read a Hugging Face configuration.

        Raises:
            KeyError: it lacks a size.
        """
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            query_heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
        )


def linear_layers(model: ModelSize) -> int:
    """Operations of the projections and the feed-forward network of all layers, Eq. 6."""
    query_and_output = 2 * 2 * model.hidden * model.query_heads * model.head_dim
    keys_and_values = 2 * 2 * model.kv_heads * model.head_dim * model.hidden
    feed_forward = 3 * 2 * model.hidden * model.intermediate
    return model.layers * (query_and_output + keys_and_values + feed_forward)


def attention(model: ModelSize, attended: float) -> float:
    """Operations of attention: Eq. 7 where all tokens are attended to, Eq. 10 where some are."""
    return model.layers * 4 * model.query_heads * model.head_dim * attended


def scoring(model: ModelSize, candidates: float) -> float:
    """Operations of the products of one query with `candidates` keys in all layers.

    The last term of Eq. 8, where the candidates are all tokens, and of Eq. 9, where they are pages.
    A cache rank does the work of Eq. 8 too, on its own device and beside the step.
    """
    return model.layers * 2 * model.query_heads * model.head_dim * candidates


def decode_token(
    model: ModelSize, mode: str, tokens: float, selected: float, dense_layers: int = 0
) -> float:
    """All operations of the inference rank for a token, Eq. 11.

    Args:
        model: the sizes.
        mode: what a step attends to, as in `scripts.shared.systems.System`.
        tokens: T, of the sequence; a mean over steps gives the mean, all terms being linear in it.
        selected: C, that sparse layers attend to; in the dense mode it does not matter.
        dense_layers: first layers which attend to everything; the paper has none.
    """
    scored = {"dense": 0.0, "window": 0.0, "cache-rank": 0.0}
    scored |= {"quest": tokens / QUEST_PAGE, "tova": tokens, "oracle": tokens}
    if mode == "dense":
        dense_layers = model.layers
    sparse = msgspec.structs.replace(model, layers=model.layers - dense_layers)
    dense = msgspec.structs.replace(model, layers=dense_layers)
    return (
        linear_layers(model)
        + attention(dense, tokens)
        + attention(sparse, min(selected, tokens))
        + scoring(sparse, scored[mode])
    )
