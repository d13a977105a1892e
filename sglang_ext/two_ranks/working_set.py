"""Which pool rows a request attends to: the working-set table and the reserve behind it.

SGLang's attention backends read K and V through a table from request and token to pool row. Built
over this table instead, the same backend serves dense and sparse requests in one batch. A dense
request's row is its true row. A sparse request's row is

    sinks | recent tokens and the current one, as a ring | selected tokens

where drafts are verified

    sinks | selected tokens | recent tokens, the current one, drafts

with a short length; keys carry their rotation, so order is free. Sinks and selected tokens live in
the *reserve*: pool rows beyond those that SGLang's allocator hands out, one block a request. What a
reserve row holds differs per layer and kv head, which is what makes selection token by token and
head by head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.copies import upload


class Reserve:
    """Blocks of pool rows that SGLang's allocator never sees.

    A block holds the sinks and the k slots of one sparse request.
    """

    def __init__(self, first_row: int, block_rows: int, blocks: int) -> None:
        self.block_rows = block_rows
        self._first_row = first_row
        self._free = list(range(blocks))[::-1]

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Take a free block, and return its first pool row."""
        return self._first_row + self._free.pop() * self.block_rows

    def give_back(self, first_row: int) -> None:
        self._free.append((first_row - self._first_row) // self.block_rows)


class WorkingSetTable:
    """The table of every request slot, dense and sparse.

    Attributes:
        table: (request slots, width) int32 pool rows, in the place of SGLang's own table.
        nowhere: a place behind it, see `places_of_current_token`, that no request has.
    """

    def __init__(self, req_to_token: Tensor, config: CacheRankConfig) -> None:
        """Start beside SGLang's table, (request slots, context length) int32."""
        self._true = req_to_token
        self._sinks = config.sink_tokens
        self._ring = config.recent_tokens + 1
        self._slots = config.sparse_budget
        self._drafts = config.draft_steps
        width = self._sinks + self._ring + self._slots + self._drafts
        width = max(req_to_token.shape[1], width)
        self.nowhere = req_to_token.shape[0] * width
        self._flat_true = req_to_token.view(-1)
        self._flat_table = req_to_token.new_zeros(self.nowhere + 1)
        self.table = self._flat_table[: self.nowhere].view(-1, width)
        self._copied: dict[int, int] = {}
        self._true_width, self._width = req_to_token.shape[1], width

    def sparse_length(self, filled_slots: int) -> int:
        """Return how many tokens a sparse request attends to."""
        return self._sinks + self._ring + filled_slots

    def enter(self, row: int, position: int, block: int) -> None:
        """Make a row sparse, before the step at `position`.

        Args:
            position: of the current token; at least sinks + recent tokens.
            block: first pool row of its reserve block.
        """
        self._copied.pop(row, None)
        working_set = self.table[row]
        reserve = torch.arange(
            block, block + self._sinks + self._slots, dtype=torch.int32, device=self.table.device
        )
        working_set[: self._sinks] = reserve[: self._sinks]
        if self._drafts:  # `begin_round` writes the rest
            working_set[self._sinks : self._sinks + self._slots] = reserve[self._sinks :]
            return
        after_ring = self._sinks + self._ring
        working_set[after_ring : after_ring + self._slots] = reserve[self._sinks :]
        recent = torch.arange(position - self._ring + 1, position + 1, device=self.table.device)
        working_set[self._sinks + recent % self._ring] = self._true[row, recent]

    def begin_round(self, rows: Sequence[int], positions: Sequence[int]) -> None:
        """Let sparse rows have the newest tokens, and the drafts to come: pool rows are taken."""
        (of_rows,) = upload((torch.tensor((rows, positions)),), self.table.device)
        newest = torch.arange(1 - self._ring, self._drafts, device=self.table.device)
        row, position = of_rows[0, :, None], of_rows[1, :, None] + newest
        columns = self._sinks + self._slots + self._ring - 1 + newest
        self.table[row, columns] = self._true[row, position]

    def places_of_current_token(self, row: int, position: int, is_sparse: bool) -> tuple[int, int]:
        """Find where the current token of a request comes from and goes to.

        Args:
            position: of the current token.
            is_sparse: whether the row is sparse; of a dense one, what is new here is copied.

        Returns:
            Places in the two flattened tables, for `add`.
        """
        column = position
        if is_sparse and self._drafts:
            return row * self._true_width + position, self.nowhere
        if is_sparse:
            column = self._sinks + position % self._ring
        else:
            copied = self._copied.get(row, 0)
            if copied < position:
                self.table[row, copied:position] = self._true[row, copied:position]
            self._copied[row] = max(copied, position + 1)
        return row * self._true_width + position, row * self._width + column

    def add(self, sources: Tensor, targets: Tensor) -> None:
        """Add the current token of every request in a batch.

        Args:
            sources, targets: (B,) int64 of `places_of_current_token`, on the device; beyond the
                batch, any source may go `nowhere`.
        """
        current = self._flat_true.index_select(0, sources)
        self._flat_table.index_copy_(0, targets, current)

    def forget(self, row: int) -> None:
        """Forget a request slot, whose request has left it or is dense again."""
        self._copied.pop(row, None)
