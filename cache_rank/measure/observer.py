"""Watches a cache rank at work: a recording of what came and was chosen, and a timeline."""

from __future__ import annotations

import torch

from cache_rank.config import CacheRankConfig
from cache_rank.measure.recording import Recorder
from cache_rank.measure.timeline import Timeline
from cache_rank.protocol import Step, UpMessage
from cache_rank.schedule import LayerMessage
from cache_rank.selector import Selector, SelectorStep


class Observer:
    """Is told of what happens, and changes nothing of it.

    Attributes:
        recorder: of shipments; of steps it is told by `on_answer`.
        timeline: marked by the parts of a step's work.
    """

    def __init__(self, config: CacheRankConfig, trace: str, device: torch.device) -> None:
        """Record where the environment says, and append timelines to the file `trace`, if any."""
        self.recorder = Recorder.from_environment(config)
        self.timeline = Timeline(trace, device, config.layer_messages)

    def on_step(self, message: Step) -> None:
        """A step begins."""
        self.timeline.enter_step(message.step, message.traced)

    def on_wait(self, layer_message: LayerMessage) -> None:
        """The wait for a message begins."""
        self.timeline.mark(layer_message, "begin")

    def on_message(self, layer_message: LayerMessage) -> None:
        """The message has come."""
        self.timeline.mark(layer_message, "receive")

    def on_answer(
        self, selector: Selector, step: SelectorStep, layer_message: LayerMessage, up: UpMessage
    ) -> None:
        """The answer to a message has been queued."""
        self.recorder.record_step(selector, step, layer_message, up)
