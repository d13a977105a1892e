"""Pairs of a server that prefills and one that decodes, and requests to both."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from scripts.shared.serving import Server, free_port
from sglang_ext.disaggregation.wire import SECRET_VARIABLE
from sglang_ext.flags import TRANSFERS

SECRET = {SECRET_VARIABLE: "known to both servers"}

_rooms = itertools.count(1)


class Half(Server):
    """A server that prefills, or decodes what others have prefilled."""

    def __init__(
        self,
        mode: str,
        flags: Sequence[str],
        environment: dict[str, str] | None = None,
        bootstrap_port: int | None = None,
    ) -> None:
        self.bootstrap_port = bootstrap_port or free_port()
        given = ["--disaggregation-mode", mode, "--disaggregation-transfer-backend", TRANSFERS]
        given += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        super().__init__([*given, *flags], SECRET | (environment or {}))


def ask_both(
    prefill: Half, decode: Half, prompts: Sequence[Sequence[int]], count: int, **options: Any
) -> list[Any]:
    """Ask both servers, as SGLang's load balancer does; the answers of the one that decodes."""
    options["bootstrap_host"] = ["127.0.0.1"] * len(prompts)
    options["bootstrap_port"] = [prefill.bootstrap_port] * len(prompts)
    options["bootstrap_room"] = [next(_rooms) for _ in prompts]
    with ThreadPoolExecutor(1) as pool:
        prefilled = pool.submit(prefill.generate_all, prompts, count, **options)
        answers = decode.generate_all(prompts, count, **options)
        firsts = [each["output_ids"] for each in prefilled.result()]
    assert [each["output_ids"][:1] for each in answers] == firsts
    return answers


def body_for_both(prefill: Half, prompt: Sequence[int], count: int) -> dict[str, Any]:
    """What both servers are asked for one request."""
    sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    meeting: dict[str, Any] = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.bootstrap_port,
    }
    meeting["bootstrap_room"] = next(_rooms)
    return {"input_ids": list(prompt), "sampling_params": sampling, **meeting}
