"""What a request leaves to the radix cache, in the way of each release of SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_requests import fake_request

from sglang_ext import compat

TOKENS = 10
"""So many tokens of a request are in the pool, in rows 100 to 109."""


class Tree:
    """Notes what is offered, and which rows are freed beside it."""

    def __init__(self) -> None:
        table = torch.arange(100, 100 + TOKENS).view(1, TOKENS)
        self.req_to_token_pool = SimpleNamespace(req_to_token=table)
        self.token_to_kv_pool_allocator = self
        self.freed: list[int] = []
        self.offered: Any = None

    def free(self, rows: torch.Tensor) -> None:
        self.freed += rows.tolist()

    def finish(self, request: Any, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        self.offered = is_insert, kv_len_to_handle

    def checkpoint(self, request: Any, *, up_to: int) -> None:
        self.offered = up_to


def request(tokens: int = TOKENS) -> Any:
    return fake_request(req_pool_idx=0, origin_input_ids=[1] * 4, output_ids=[1] * (tokens - 4))


@pytest.mark.parametrize(("most", "offered"), [(None, 10), (4, 4), (10, 10), (12, 10)])
def test_no_more_is_offered_than_may_be(most: int | None, offered: int) -> None:
    tree = Tree()
    compat._insert_and_free(Tree.finish, tree, request(), most, kv_len_to_handle=TOKENS)
    assert tree.offered == (True, offered)
    assert tree.freed == list(range(100 + offered, 100 + TOKENS))
    # In the new release what calls it frees the rows of the others.
    tree = Tree()
    compat._insert_up_to(Tree.checkpoint, tree, request(), most, up_to=TOKENS)
    assert (tree.offered, tree.freed) == (offered, [])


@pytest.mark.parametrize(("tokens", "handled"), [(10, 10), (7, 7), (12, 10)])
def test_rows_of_steps_that_were_taken_back_are_freed(tokens: int, handled: int) -> None:
    tree = Tree()
    compat._insert_and_free(Tree.finish, tree, request(tokens), 4, False, kv_len_to_handle=TOKENS)
    assert tree.offered == (False, handled)
    assert tree.freed == list(range(100 + handled, 100 + TOKENS))
