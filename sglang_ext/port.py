"""A port is taken before the model is loaded, not when SGLang listens on it at the end."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from sglang_ext.refusals import UnsupportedError


@contextmanager
def reserved(host: str, port: int) -> Iterator[None]:
    """Hold a port among servers of ours until this process ends or the context does.

    SGLang binds the port itself, so that it cannot be bound here. What is bound is a name that,
    like ports, one process of a network namespace can have, and that leaves nothing behind.
    """
    if not 0 < port < 1 << 16:
        raise UnsupportedError(f"--port {port}: ports go from 1 to 65535. Choose one of them.")
    with socket.socket(socket.AF_UNIX) as name:
        try:
            name.bind(f"\0sglang-cache-rank-port-{port}")
        except OSError:
            raise UnsupportedError(
                f"--port {port}: a server that is starting has taken that port. Choose another one."
            ) from None
        _require_free(host, port)
        yield


def _require_free(host: str, port: int) -> None:
    """Bind the port for a moment as SGLang will."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UnsupportedError(f"--host {host}: {error.strerror}. Choose another one.") from None
    errors: list[OSError] = []
    for family, kind, _, _, address in addresses:
        try:
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
        except OSError as error:
            errors.append(error)
    # A host name may have an address of a family that this machine does without.
    if len(errors) == len(addresses) or any(error.errno == errno.EADDRINUSE for error in errors):
        raise UnsupportedError(
            f"--port {port}: it cannot be had on {host} ({errors[-1].strerror}). "
            "Choose another one."
        )
