"""What a cache rank is told of a model's layers, to forecast queries and to sketch keys."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from sglang_ext.calibration.files import Source, read, sources
from sglang_ext.calibration.fitting import Correction
from sglang_ext.calibration.key_statistics import KeyBasis
from sglang_ext.projections import DecoderLayer, decoder_layers, projection_of
from sglang_ext.server_args import CacheRankServerArgs

logger = logging.getLogger(__name__)


class SelectionWeights:
    """What the cache rank selects by; sparse layers are counted from the first sparse one.

    Attributes:
        layers: the sparse ones, where queries are forecast.
    """

    def __init__(self, model: torch.nn.Module, args: CacheRankServerArgs) -> None:
        """Read the layers, and the calibration if there is one.

        Raises:
            ValueError: the model is not built as a forecast needs it.
            CalibrationError: the calibration cannot be read.
        """
        self.forecasts = args.query_predictor == "forecast"
        self.sketches = args.score_keys == "sketch"
        self._first = args.dense_layers
        self.layers: list[DecoderLayer] = []
        self._sources: dict[int, Source] = {}
        if self.forecasts:
            layers = decoder_layers(model)
            schedule = (args.dense_layers, args.layers_per_group, args.forecast_lead)
            self._sources = sources(len(layers), *schedule)
            self.layers = layers[self._first :]
        self._corrections: dict[int, Correction] = {}
        self._bases: dict[int, KeyBasis] = {}
        if args.calibration is not None:
            _, self._corrections, self._bases = read(Path(args.calibration))
        elif self.forecasts:
            logger.info(
                "cache rank: queries are forecast by the model's own projections. On SmolLM2 that "
                "diverged two to three times as far from dense decoding as corrected ones, which "
                "python -m sglang_ext.calibrate makes for --calibration"
            )

    def projection(self, layer: int, dtype: torch.dtype) -> Tensor | None:
        """What a sparse layer's queries are forecast by, (H + 2, Hq, D): see QueryProjection.

        The model's weights are read anew, so that an update of them is heeded.

        Returns:
            None where only the token before can tell them, and no calibration says how.
        """
        correction = self._corrections.get(self._first + layer)
        is_before = self._sources[self._first + layer].is_before
        if is_before and correction is None:
            return None
        projection = projection_of(self.layers[layer], torch.float32, is_before)
        if correction is not None:
            left, right = (part.to(projection.device) for part in correction)
            projection[:-1] += (left @ right).view(projection[:-1].shape)
        return projection.to(dtype)

    def basis(self, layer: int, device: torch.device) -> Tensor:
        """How a sparse layer's keys are sketched, (Hkv, D + 1, D); see protocol.KeyBasis."""
        basis, mean = self._bases[self._first + layer]
        return torch.cat((basis, mean.unsqueeze(1)), dim=1).to(device)
