"""What a running server says of itself: enough to tell two runs apart."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import msgspec

from scripts.shared.serving import Client, ServerError, cache_rank_state

_HIDDEN = ("api_key", "admin_api_key", "ssl_keyfile_password", "internal_states")
_DENSE_REQUESTS = re.compile(
    r'^sglang_cache_rank_dense_requests_total\{.*reason="(\w+)".*\} (\S+)$', re.MULTILINE
)
_GROWING = ("steps", "tokens_shipped", "steps_waited", "wait_seconds", "retractions", "starts")
"""These parts of the cache rank's state only grow."""


class Counters(msgspec.Struct):
    """What has happened on a server since it started.

    Attributes:
        cache_rank: counters of `/server_info`; empty without a cache rank.
        dense_requests: by reason, requests beyond the sparse threshold that had a step which
            stayed dense; empty where the server does not export metrics.
    """

    cache_rank: dict[str, float] = {}
    dense_requests: dict[str, int] = {}

    def since(self, earlier: Counters) -> Counters:
        """What has happened since another reading of the same server."""
        grown: list[dict[str, Any]] = []
        for name in self.__struct_fields__:
            then = Counter(getattr(earlier, name))
            grown.append({key: now - then[key] for key, now in getattr(self, name).items()})
        return Counters(*grown)


class EvaluatedServer(Client):
    """A server that answers benchmarks.

    Attributes:
        info: what `/server_info` said at first, less secrets and internal states.
        context_length: tokens that a request may have, its answer included.
        capacity_tokens: tokens that the cache rank can hold; 0 without one.
    """

    def __init__(self, url: str) -> None:
        """Ask a server.

        Raises:
            ServerError: it does not answer, is not ready, or is not SGLang's.
        """
        super().__init__(url)
        if self.get("/health").status_code != 200:
            raise ServerError(f"{self.url} is not ready: /health does not answer 200")
        info = self.read("/server_info")
        self.capacity_tokens = int(cache_rank_state(info).get("capacity_tokens", 0))
        self.context_length = int(self.read("/v1/models")["data"][0]["max_model_len"])
        self.info = {name: value for name, value in info.items() if name not in _HIDDEN}

    def most_sparse_requests(self, request_tokens: int) -> int:
        """The requests of this length, answer included, that the cache rank can hold at once.

        A request reserves the memory of its longest possible answer; one for which there is no room
        or no working set stays dense until there is.
        """
        length = min(request_tokens, self.context_length) + 1
        return min(int(self.info["max_sparse_requests"]), self.capacity_tokens // length)

    def counters(self) -> Counters:
        """Read the counters; those of requests take --enable-metrics."""
        state = self.cache_rank()
        text = self.get("/metrics").text if self.info.get("enable_metrics") else ""
        dense = {reason: int(float(count)) for reason, count in _DENSE_REQUESTS.findall(text)}
        return Counters(
            {name: state[name] for name in _GROWING if name in state},
            {reason: count for reason, count in dense.items() if count},
        )
