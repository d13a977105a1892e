"""Checks that a port is free before the model is loaded; SGLang binds it afterwards."""

from __future__ import annotations

import errno
import socket

from sglang_ext.refusals import UnsupportedError


def require_free(host: str, port: int) -> None:
    """Bind a port for a moment as SGLang will.

    Raises:
        UnsupportedError: another process has the port, or this host cannot be bound to.
    """
    if not 0 < port < 1 << 16:
        raise UnsupportedError(f"--port {port}: ports go from 1 to 65535. Choose one of them.")
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
