"""What happens to a server, and its cache rank if it has one, while it is in use."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from scripts.operations.streams import Streams
from scripts.shared.serving import Client
from sglang_ext.server_args import BUNDLED_MODEL


class Scene(NamedTuple):
    """What a disturbance acts on.

    Attributes:
        timeout: seconds after which the server counts a silent cache rank as down.
    """

    client: Client
    streams: Streams
    source: random.Random
    timeout: float


class Disturbance(NamedTuple):
    """One kind of disturbance.

    Attributes:
        act: does it.
        weight: how often it comes beside the others.
        of_cache_rank: whether it takes a cache rank.
    """

    act: Callable[[Scene], None]
    weight: int
    of_cache_rank: bool = False


def kill(scene: Scene) -> None:
    """The cache rank dies."""
    _signal(scene, signal.SIGKILL)


def stall(scene: Scene) -> None:
    """The cache rank stops for longer than it may."""
    pid = _signal(scene, signal.SIGSTOP)
    if pid is not None:
        time.sleep(scene.timeout + 0.5)
        _signal_process(pid, signal.SIGCONT)


def delay(scene: Scene) -> None:
    """The cache rank stops for a moment."""
    pid = _signal(scene, signal.SIGSTOP)
    if pid is not None:
        time.sleep(scene.timeout / 8)
        _signal_process(pid, signal.SIGCONT)


def abort(scene: Scene) -> None:
    """A client goes away."""
    if active := scene.streams.active():
        _post(scene, "/abort_request", {"rid": scene.source.choice(active)})


def pause(scene: Scene) -> None:
    """Generation stops for a moment, with all requests in place or to be recomputed."""
    _post(scene, "/pause_generation", {"mode": scene.source.choice(["in_place", "retract"])})
    time.sleep(scene.source.uniform(0, 0.5))
    _post(scene, "/continue_generation")


def flush(scene: Scene) -> None:
    """Somebody flushes the prefix cache, which is refused while requests run."""
    _post(scene, "/flush_cache", accepted=(200, 400))


def update_weights(scene: Scene) -> None:
    """The weights are loaded again, when the requests under way have ended."""
    _post(scene, "/update_weights_from_disk", {"model_path": str(BUNDLED_MODEL)})


def update_weights_in_a_pause(scene: Scene) -> None:
    """The weights are loaded again in the middle of requests, as loops of training do."""
    _post(scene, "/pause_generation", {"mode": "retract"})
    update_weights(scene)
    _post(scene, "/continue_generation")


DISTURBANCES = {
    "kill": Disturbance(kill, 2, of_cache_rank=True),
    "stall": Disturbance(stall, 1, of_cache_rank=True),
    "delay": Disturbance(delay, 4, of_cache_rank=True),
    "abort": Disturbance(abort, 8),
    "pause": Disturbance(pause, 4),
    "flush": Disturbance(flush, 4),
    "update": Disturbance(update_weights, 1),
    "update in a pause": Disturbance(update_weights_in_a_pause, 1),
}


def disturb(scene: Scene, names: Sequence[str]) -> str:
    """Do one of these, drawn by weight.

    Returns:
        Its name.

    Raises:
        RuntimeError: the server did not take it.
    """
    (name,) = scene.source.choices(names, [DISTURBANCES[name].weight for name in names])
    DISTURBANCES[name].act(scene)
    return name


def _signal(scene: Scene, number: signal.Signals) -> int | None:
    """Signal the cache rank if there is one.

    Returns:
        Its pid.
    """
    pid = scene.client.cache_rank().get("pid")
    return pid if pid is not None and _signal_process(pid, number) else None


def _signal_process(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _post(
    scene: Scene,
    path: str,
    body: dict[str, Any] | None = None,
    accepted: tuple[int, ...] = (200,),
) -> None:
    response = scene.client.post(path, body)
    if response.status_code not in accepted:
        raise RuntimeError(f"{path} answers {response.status_code}: {response.text[:200]}")
