"""What both ranks agree on when a cache rank opens: the model's shape and the selection policy."""

from __future__ import annotations

import functools
from typing import Literal

import msgspec
import torch

from cache_rank.budget import DEFAULT_CURVE, BudgetCurve
from cache_rank.kernels.select.reference import MOST_SLOTS
from cache_rank.kernels.wire.reference import wire_width
from cache_rank.schedule import LayerMessage, by_forecast, by_history

HistoryPredictor = Literal["last", "spade"]
Predictor = Literal[HistoryPredictor, "forecast"]
ScoreKeys = Literal["resident", "sketch"]
ScoreNormalizer = Literal["all", "attended"]
WireDtype = Literal["bf16", "int8"]
SMALL_SWAP_TOKENS = 64
"""So many tokens may enter in a step by default even where they are more than a sixteenth of the
slots: a message of them is short, and a small selection that changes slowly is a poor one."""

OptionValue = int | float | str

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The attention layers that the cache rank serves.

    Attributes:
        layers: number of sparse layers; layer 0 here is the model's first layer that is not dense.
        query_heads, kv_heads: heads of one tensor-parallel rank; kv_heads divides query_heads.
        head_dim: D of queries, keys and values.
        dtype: dtype of the inference rank's KV pool, a key of DTYPES.
        scale: factor on attention logits.
        rotary_frequency: (R / 2,) inverse frequencies; empty without rotary embedding.
        rotary_interleaved: rotary pairs are neighbours instead of halves.
        rotary_scale: factor on what is rotated.
        hidden_size: width of the hidden state that enters a layer; 0 where nobody forecasts.
        norm_epsilon: of the root mean square norm of that state.
        query_norm_epsilon: of the root mean square norm of each query head; None without one.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    scale: float
    rotary_frequency: tuple[float, ...] = ()
    rotary_interleaved: bool = False
    rotary_scale: float = 1.0
    hidden_size: int = 0
    norm_epsilon: float = 1e-6
    query_norm_epsilon: float | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "query_heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype} is not one of {', '.join(DTYPES)}")
        if self.query_heads % self.kv_heads:
            raise ValueError("kv_heads must divide query_heads")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def frequency(self, device: torch.device) -> torch.Tensor | None:
        """`rotary_frequency` as kernels take it; None without rotary embedding."""
        return torch.tensor(self.rotary_frequency, device=device) if self.rotary_frequency else None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V over all layers, as the inference rank holds them."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.torch_dtype.itemsize


class CacheRankConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Selection policy. The launcher's flags have the same names, and defaults of their own.

    Attributes:
        model: shape of the sparse layers.
        layers_per_group: consecutive layers packed in one message.
        sparse_budget: k, slots of each (layer, request, kv head).
        budget_factor, least_budget: how many of them a request fills, by its length, see
            BudgetCurve; all, if the factor is 0, or in drafts, whose rows end with them.
        sink_tokens, recent_tokens: always attended; never compete for slots.
        query_window: W, predecessors the next query is regressed on.
        query_predictor: how the next query is predicted: from earlier ones, rotated to its
            position, or by `forecast`, from the hidden state of the step itself, which needs more
            layer groups than `forecast_lead`.
        forecast_lead: a group's queries are forecast from what enters the group so many before it.
        hysteresis: a token stays while it is among the best k + hysteresis; by default k // 8. Less
            in proportion, where a request fills fewer slots.
        max_swap_tokens: most tokens that enter a (layer, request, kv head) in one step; by default
            k // 16, but up to SMALL_SWAP_TOKENS whatever k is.
        kv_residency: how K and V are held. By default scores read a quarter of what they would of
            keys in bfloat16, and choose nearly the same tokens.
        kv_residency_options: options of that format, which checks them.
        score_keys: score by the keys as they are held, or by a sketch of them.
        sketch_bits: bits of a sketch, an element of a key.
        score_normalizer: a score is a logit less a log-sum-exp: over all tokens, or, of sketches,
            over those that are attended to, which is known before the others are read.
        wire_dtype: dtype of the keys and values of an answer; bf16 is the KV pool's own dtype,
            whichever it is, and int8 has a scale for 8 channels.
        draft_steps: 0, or the most steps that follow one another of a request from the newest token
            that is held: they only draft. What they bring of K and V is not held; the tokens that
            come of them are shipped.
        verified_tokens: 0, or how many tokens of a request are verified at once, at most: the cache
            rank attends for them to all that it holds.
        max_rows: most requests of one step.
        checksum: both ranks compare checksums of the slots at every step (slow, for debugging).

    Raises:
        ValueError: a field is out of range.
    """

    model: ModelShape
    layers_per_group: int = 6
    sparse_budget: int = DEFAULT_CURVE.most
    budget_factor: int = 0
    least_budget: int = 0
    sink_tokens: int = 4
    recent_tokens: int = 64
    query_window: int = 16
    query_predictor: Predictor = "last"
    forecast_lead: int = 2
    # These two follow the budget where they are not given; see __post_init__.
    hysteresis: int = None  # type: ignore[assignment]
    max_swap_tokens: int = None  # type: ignore[assignment]
    kv_residency: str = "quantspec"
    kv_residency_options: dict[str, OptionValue] = msgspec.field(default_factory=dict)
    score_keys: ScoreKeys = "resident"
    sketch_bits: Literal[1, 2, 3, 4] = 2
    score_normalizer: ScoreNormalizer = "all"
    wire_dtype: WireDtype = "bf16"
    draft_steps: int = 0
    verified_tokens: int = 0
    max_rows: int = 256
    checksum: bool = False

    def __post_init__(self) -> None:
        budget = self.sparse_budget
        by_budget = {
            "hysteresis": budget // 8,
            "max_swap_tokens": max(budget // 16, min(budget, SMALL_SWAP_TOKENS)),
        }
        for name, value in by_budget.items():
            if getattr(self, name) is None:
                msgspec.structs.force_setattr(self, name, value)
        at_least_one = (
            "layers_per_group",
            "sparse_budget",
            "query_window",
            "max_swap_tokens",
            "max_rows",
            "forecast_lead",
        )
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        not_negative = (
            "sink_tokens",
            "recent_tokens",
            "hysteresis",
            "draft_steps",
            "verified_tokens",
        )
        for name in (*not_negative, "budget_factor", "least_budget"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        margin = self.hysteresis
        if budget > MOST_SLOTS:
            raise ValueError(f"sparse_budget must be at most {MOST_SLOTS}, got {budget}")
        if self.max_swap_tokens > MOST_SLOTS:
            raise ValueError(
                f"max_swap_tokens must be at most {MOST_SLOTS}, got {self.max_swap_tokens}"
            )
        if budget + margin > 2 * MOST_SLOTS:
            raise ValueError(
                f"hysteresis must be at most {2 * MOST_SLOTS - budget} beside sparse_budget "
                f"{budget}, got {margin}"
            )
        if self.forecasts and self.forecast_lead >= len(self.groups):
            raise ValueError(
                f"forecast_lead {self.forecast_lead}: there are {len(self.groups)} layer groups, "
                "and a forecast needs more than its lead; lower it or layers_per_group, or use "
                "query_predictor last"
            )
        if self.checksum and self.wire_dtype != "bf16":
            raise ValueError(
                f"wire_dtype {self.wire_dtype}: checksums compare tokens bit for bit, and shipped "
                "ones are rounded; use bf16, or no checksums"
            )
        try:
            wire_width(self.model.head_dim, self.wire_torch_dtype)
        except ValueError as error:
            raise ValueError(f"wire_dtype {self.wire_dtype}: {error}; use bf16") from error

    @property
    def wire_torch_dtype(self) -> torch.dtype:
        """Dtype of the keys and values of an answer."""
        return torch.int8 if self.wire_dtype == "int8" else self.model.torch_dtype

    @property
    def wire_width(self) -> int:
        """Elements of that dtype that a key or a value of an answer takes."""
        return wire_width(self.model.head_dim, self.wire_torch_dtype)

    @property
    def groups(self) -> tuple[range, ...]:
        """Layers of each group, counted from the first sparse layer."""
        return _groups_of(self.model.layers, self.layers_per_group)

    @property
    def forecasts(self) -> bool:
        """Whether queries are forecast from the hidden state of the same step."""
        return self.query_predictor == "forecast"

    @property
    def history_predictor(self) -> HistoryPredictor:
        """What predicts the queries of groups that are answered for the next step."""
        return "last" if self.query_predictor == "forecast" else self.query_predictor

    @property
    def budget_curve(self) -> BudgetCurve:
        """How many slots a request fills, by its length."""
        factor = 0 if self.draft_steps else self.budget_factor
        return _curve_of(factor, self.least_budget, self.sparse_budget)

    @property
    def layer_messages(self) -> tuple[LayerMessage, ...]:
        """The messages of a step, in order."""
        groups = len(self.groups)
        return by_forecast(groups, self.forecast_lead) if self.forecasts else by_history(groups)

    def candidates_after(self, position: int) -> range:
        """Positions that compete for slots in the step that follows `position`.

        The following step attends to sinks and to its newest `recent_tokens` predecessors anyway.
        """
        return range(self.sink_tokens, max(self.sink_tokens, position - self.recent_tokens + 1))

    def filled_after(self, position: int, filled: int) -> int:
        """Slots in use after the answer to `position`, given how many were in use before it.

        Pure arithmetic, so that both ranks know it without a message.
        """
        return min(self.slots_wanted_after(position), filled + self.max_swap_tokens)

    def slots_wanted_after(self, position: int) -> int:
        """Slots that the step after `position` can use: one a candidate, within the budget."""
        return min(self.budget_after(position), len(self.candidates_after(position)))

    def budget_after(self, position: int) -> int:
        """Slots that the step after `position` may fill."""
        return self.budget_curve.at(position + 1)


@functools.cache
def _curve_of(factor: int, least: int, most: int) -> BudgetCurve:
    return BudgetCurve(factor, least, most) if factor else BudgetCurve.flat(most)


@functools.cache
def _groups_of(layers: int, layers_per_group: int) -> tuple[range, ...]:
    starts = range(0, layers, layers_per_group)
    return tuple(range(first, min(first + layers_per_group, layers)) for first in starts)
