"""What happens to a server, and its cache rank if it has one, while it is in use."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from scripts.operations.streams import Streams
from scripts.shared.serving import Client
from sglang_ext.server_args import BUNDLED_MODEL


class Scene(NamedTuple):
    """What a disturbance acts on."""

    client: Client
    streams: Streams
    source: random.Random
    timeout: float  # seconds after which the server counts a silent cache rank as down

    def post(self, path: str, body: dict[str, Any] | None = None, *accepted: int) -> None:
        """Post to the server; RuntimeError if it does not take that."""
        response = self.client.post(path, body)
        if response.status_code not in (200, *accepted):
            raise RuntimeError(f"{path} answers {response.status_code}: {response.text[:200]}")


def stop(scene: Scene, seconds: float) -> None:
    """The cache rank stops for so long."""
    pid = scene.client.signal_cache_rank(signal.SIGSTOP)
    if pid is not None:
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def abort(scene: Scene) -> None:
    """A client goes away."""
    if active := scene.streams.active():
        scene.post("/abort_request", {"rid": scene.source.choice(active)})


def pause(scene: Scene) -> None:
    """Generation stops for a moment, with all requests in place or to be recomputed."""
    scene.post("/pause_generation", {"mode": scene.source.choice(["in_place", "retract"])})
    time.sleep(scene.source.uniform(0, 0.5))
    scene.post("/continue_generation")


def update_weights(scene: Scene) -> None:
    """The weights are loaded again, when the requests under way have ended."""
    scene.post("/update_weights_from_disk", {"model_path": str(BUNDLED_MODEL)})


def update_weights_in_a_pause(scene: Scene) -> None:
    """The weights are loaded again in the middle of requests, as loops of training do."""
    scene.post("/pause_generation", {"mode": "retract"})
    update_weights(scene)
    scene.post("/continue_generation")


class Disturbance(NamedTuple):
    """One kind of disturbance."""

    act: Callable[[Scene], object]
    weight: int  # how often it comes beside the others
    of_cache_rank: bool = False  # whether it takes a cache rank


DISTURBANCES = {
    "kill": Disturbance(lambda scene: scene.client.signal_cache_rank(signal.SIGKILL), 2, True),
    "stall": Disturbance(lambda scene: stop(scene, scene.timeout + 0.5), 1, True),
    "delay": Disturbance(lambda scene: stop(scene, scene.timeout / 8), 4, True),
    "abort": Disturbance(abort, 8),
    "pause": Disturbance(pause, 4),
    # SGLang refuses to flush its prefix cache while requests run.
    "flush": Disturbance(lambda scene: scene.post("/flush_cache", None, 400), 4),
    "update": Disturbance(update_weights, 1),
    "update in a pause": Disturbance(update_weights_in_a_pause, 1),
}
