"""What a running server says of itself: enough to tell two runs apart."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import requests

_TIMEOUT = 30
_SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")
_DENSE_REQUESTS = re.compile(
    r'^sglang_cache_rank_dense_requests_total\{.*reason="(\w+)".*\} (\S+)$', re.MULTILINE
)


class ServerError(RuntimeError):
    """No server answers, or not one that can be evaluated."""


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
        return Counters(
            {
                name: value - earlier.cache_rank.get(name, 0)
                for name, value in self.cache_rank.items()
            },
            {
                reason: count - earlier.dense_requests.get(reason, 0)
                for reason, count in self.dense_requests.items()
            },
        )


# Of the cache rank's state, what only grows.
_GROWING = ("steps", "tokens_shipped", "steps_waited", "wait_seconds", "retractions", "starts")


class Server:
    """A server at a URL, with or without a trailing /v1.

    Attributes:
        url: without /v1.
        info: what `/server_info` said at first, less secrets and internal states.
        context_length: tokens that a request may have, its answer included.
        capacity_tokens: tokens that the cache rank can hold; 0 without one.
    """

    def __init__(self, base_url: str) -> None:
        """Ask a server.

        Raises:
            ServerError: it does not answer, is not ready, or is not SGLang's.
        """
        self.url = base_url.rstrip("/").removesuffix("/v1")
        if self._get("/health").status_code != 200:
            raise ServerError(f"{self.url} is not ready: /health does not answer 200")
        info = self._json("/server_info")
        models = self._json("/v1/models")["data"]
        self.capacity_tokens = int(_state(info).get("capacity_tokens", 0))
        self.context_length = int(models[0]["max_model_len"])
        self.info: dict[str, Any] = {
            name: value
            for name, value in info.items()
            if name not in _SECRETS and name != "internal_states"
        }

    @property
    def has_cache_rank(self) -> bool:
        """Whether requests can turn sparse on a cache rank."""
        return bool(self.info.get("cache_rank_gpus"))

    @property
    def has_metrics(self) -> bool:
        """Whether it exports Prometheus series."""
        return bool(self.info.get("enable_metrics"))

    def most_sparse_requests(self, request_tokens: int) -> int:
        """Requests of this length, answer included, that the cache rank can hold at once.

        A request reserves the memory of its longest possible answer; one for which there is no room
        or no working set stays dense until there is.
        """
        length = min(request_tokens, self.context_length) + 1
        return min(int(self.info["max_sparse_requests"]), self.capacity_tokens // length)

    def cache_rank(self) -> dict[str, Any]:
        """What `/server_info` says of the cache rank now; empty without one."""
        return _state(self._json("/server_info"))

    def counters(self) -> Counters:
        """Read the counters."""
        state = self.cache_rank()
        counters = Counters({name: state[name] for name in _GROWING if name in state})
        if self.has_metrics:
            for reason, count in _DENSE_REQUESTS.findall(self._get("/metrics").text):
                counters.dense_requests[reason] = int(float(count))
        return counters

    def _json(self, path: str) -> dict[str, Any]:
        response = self._get(path)
        if response.status_code != 200:
            raise ServerError(
                f"{self.url}{path} answers {response.status_code}: not a server of SGLang?"
            )
        return dict(response.json())

    def _get(self, path: str) -> requests.Response:
        try:
            return requests.get(f"{self.url}{path}", timeout=_TIMEOUT)
        except requests.RequestException as error:
            raise ServerError(f"no server answers at {self.url}{path}: {error}") from error


def _state(info: dict[str, Any]) -> dict[str, Any]:
    states = info.get("internal_states") or [{}]
    return states[0].get("cache_rank") or {}
