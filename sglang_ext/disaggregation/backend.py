"""The transfer backend `coded`, as SGLang's disaggregation knows it.

SGLang's manager, sender and receiver do the pairing of servers over its bootstrap server. Their
sockets for transfers are not used: each request has a connection of its own, see wire.py.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import time
from typing import Any

import numpy as np
import torch
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
    KVTransferError,
)
from sglang.srt.disaggregation.utils import KVClassType

from cache_rank.pages import PAGE_TOKENS
from sglang_ext.disaggregation import first_token
from sglang_ext.disaggregation.arrival_drafts import ArrivalDrafts, Drafting
from sglang_ext.disaggregation.arriving import Arrival
from sglang_ext.disaggregation.codec import HostPages, PageCodec, PoolRows
from sglang_ext.disaggregation.departing import Departure, Listener
from sglang_ext.disaggregation.wire import (
    SILENCE_SECONDS,
    Hello,
    link_of_environment,
    secret_of_environment,
)
from sglang_ext.flags import WIRE_FORMATS
from sglang_ext.inline import starting
from sglang_ext.two_ranks import inference_rank

SWITCH_SECONDS = 1e-4
"""How long a thread may keep Python's lock that another one waits for."""


class CodedKVManager(CommonKVManager):
    """What all transfers of a scheduler share.

    Attributes:
        pool: rows of SGLang's KV pool, when `attach` has been called.
        drafts: of requests whose K and V are still coming; None where none drafts.
    """

    def __init__(self, args: Any, mode: Any, server_args: Any, *others: Any, **kwargs: Any) -> None:
        self.secret, self.link = secret_of_environment(), link_of_environment()
        self.listener: Listener | None = None
        self.pool: PoolRows | None = None
        self.drafts: ArrivalDrafts | None = None
        super().__init__(args, mode, server_args, *others, **kwargs)
        self.server_socket.close(linger=0)  # it is bound to every network, and nobody reads it

    def register_to_bootstrap(self) -> None:
        """Tell SGLang's bootstrap server where decode servers find our listener."""
        self.listener = Listener(self.server_args.cache_rank_address, self.secret)
        self.local_ip, self.rank_port = self.listener.address, self.listener.port
        super().register_to_bootstrap()

    def attach(self, queue: Any) -> None:
        """Take over the pool of SGLang's queue of requests that wait for their peers."""
        pool, self._scheduler = queue.token_to_kv_pool, queue.scheduler
        if pool.page_size != 1:
            raise ValueError(
                f"rows of tokens travel, and this attention backend has pages of {pool.page_size}; "
                "pass --attention-backend fa3, flashinfer or triton"
            )
        # The scheduler never rests, and threads of transfers would wait for Python's lock.
        sys.setswitchinterval(SWITCH_SECONDS)
        self.pool = PoolRows(pool.k_buffer, pool.v_buffer)
        self.pages = HostPages(self.pool.on_gpu)
        for codes in {self.server_args.wire_codes, *(WIRE_FORMATS if self.pool.on_gpu else ())}:
            self.pool.codec(codes).prepare(sends=self.listener is not None)
        if self.listener is not None:
            self.listener.why_not = self._why_not
        elif self.server_args.wire_drafts:
            args = self.server_args  # without a threshold no length alone makes a request sparse
            self.drafts = ArrivalDrafts(self._scheduler, args.wire_drafts, args.sparse_threshold)

    def hello(self, room: int, tokens: int, in_parts: bool) -> Hello:
        assert self.pool is not None
        sizes = list(self.kv_args.aux_item_lens)
        return Hello(room, tokens, self.pool.shape, sizes, in_parts)

    def after_forward_passes(self) -> list[Any]:
        """On a GPU, an event behind the forward passes that have been launched."""
        if self.pool is None or not self.pool.on_gpu:
            return []
        event = torch.cuda.Event()
        event.record(self._scheduler.forward_stream)
        return [event]

    def read_metadata(self, index: int) -> bytes:
        places = zip(self.kv_args.aux_data_ptrs, self.kv_args.aux_item_lens, strict=True)
        return b"".join(ctypes.string_at(start + index * size, size) for start, size in places)

    def write_metadata(self, index: int, metadata: bytes) -> None:
        for start, size in zip(self.kv_args.aux_data_ptrs, self.kv_args.aux_item_lens, strict=True):
            ctypes.memmove(start + index * size, metadata[:size], size)
            metadata = metadata[size:]

    def release_first_token(self, request: Any, index: int) -> tuple[int, bool]:
        """Stream the first token of a request, which its metadata has; see `first_token`."""
        buffers = self._scheduler.disagg_decode_transfer_queue.metadata_buffers
        token = int(buffers.get_buf(index)[0][0])
        return token, first_token.release(self._scheduler, request, token)

    def forget_peer(self, bootstrap_addr: str) -> None:
        """Ask the bootstrap server again for a prefill server that may have come back."""
        with self.connection_lock:
            self.prefill_info_table.pop(bootstrap_addr, None)
            for key in [k for k in self.connection_pool if k.startswith(bootstrap_addr)]:
                del self.connection_pool[key]

    def pass_on(
        self,
        request: Any,
        tokens: int,
        rows: torch.Tensor,
        codec: PageCodec,
        packed: torch.Tensor,
    ) -> None:
        """Ship a page to the cache rank, if there is one; see `Arrival`.

        Args:
            tokens: of the prompt.
        """
        if (rank := inference_rank.current()) is None:
            return
        if len(rows) == PAGE_TOKENS:
            rank.on_prompt_arriving(request, tokens, self._scheduler.running_batch.reqs)
        page = codec.planes(packed) if rank.takes(codec.config) else None
        rank.on_page_arrived(request, rows, page)

    def sketch(self, rows: torch.Tensor) -> None:
        """Write sketches of what has come to pool rows, where this process selects by them."""
        rank = starting.current()
        if rank is not None and self.pool is not None:
            rank.selection.encode_pool_rows(self.pool.keys.tensors, rows)

    def _why_not(self, hello: Hello) -> str | None:
        """Why a decode server cannot have what it wants."""
        ours = self.hello(hello.room, hello.tokens, hello.in_parts)
        for field in ("version", "shape", "metadata_bytes"):
            here, there = getattr(ours, field), getattr(hello, field)
            if here != there:
                return f"{field} is {here} on the prefill server and {there} on the decode server"
        return None


class CodedKVSender(CommonKVSender):
    """Sends one request's K and V.

    Attributes:
        codes: that it is sent in, of --wire-codes unless the request asks for others.
    """

    conclude_state: int | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.codes = self.kv_mgr.server_args.wire_codes
        self._departure: Departure | None = None
        self._wanted = self._sent = 0  # tokens
        self._since = time.monotonic()
        self._failure: str | None = None

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        super().init(num_kv_indices, aux_index)
        if num_kv_indices != self._wanted:
            self._fail(f"this prompt has {num_kv_indices} tokens, and {self._wanted} are awaited")

    def send(self, kv_indices: Any, state_indices: Any = None, *_: Any, **__: Any) -> None:
        assert self._departure is not None
        events = getattr(self, "_early_send_wait_event", None), self.kv_mgr.pool.mark()
        self._early_send_wait_event = None  # SGLang's, of a prefix that it has found in its cache
        after = [event for event in events if event is not None]
        self._sent += len(kv_indices)
        is_last = self._sent == self._wanted
        metadata = self.kv_mgr.read_metadata(self.aux_index) if is_last else None
        self._departure.send(torch.from_numpy(kv_indices.astype(np.int64)), after, metadata)

    def poll(self) -> int:
        if self.conclude_state is not None:
            return self.conclude_state
        if self._departure is None:
            self._meet()
        departure = self._departure
        if departure is None:
            return KVPoll.Bootstrapping if self.conclude_state is None else self.conclude_state
        if departure.failure is not None:
            self._fail(departure.failure)
        elif departure.is_done:
            self._transfer_metric.transfer_latency_s = departure.seconds
            self._transfer_metric.transfer_total_bytes = departure.sent_bytes
            self.conclude_state = KVPoll.Success
        if self.conclude_state is not None:
            return self.conclude_state
        return KVPoll.Transferring if self._sent else KVPoll.WaitingForInput

    poll_pp_consensus = poll

    def get_transfer_metric(self) -> Any:
        return self._transfer_metric

    def failure_exception(self) -> None:
        self.clear()
        raise KVTransferError(self.bootstrap_room, self._failure or "aborted")

    def abort(self) -> None:
        self._fail("aborted")

    def clear(self) -> None:
        if self._departure is not None:
            self._departure.fail("dropped")
        super().clear()

    def _fail(self, why: str) -> None:
        self._failure = self._failure or why
        self.conclude_state = KVPoll.Failed
        if self._departure is not None:
            self._departure.fail(why)
        else:
            self.kv_mgr.listener.drop(self.bootstrap_room)

    def _meet(self) -> None:
        """Begin if the decode server has come."""
        manager = self.kv_mgr
        manager.listener.drop_unclaimed(SILENCE_SECONDS)  # their peers have given up
        if (met := manager.listener.take(self.bootstrap_room)) is not None:
            hello, wire = met
            self._wanted = hello.tokens
            of_process = manager.pool, manager.pages, manager.link
            self._departure = Departure(wire, *of_process, self.codes, hello.in_parts)
        elif (why := manager.listener.why_refused(self.bootstrap_room)) is not None:
            self._fail(f"the decode server is refused: {why}")
        elif time.monotonic() - self._since > manager.bootstrap_timeout:
            self._fail(f"no decode server came in {manager.bootstrap_timeout} seconds")


class CodedKVReceiver(CommonKVReceiver):
    """Receives one request's K and V.

    Attributes:
        request: SGLang's; a hook sets it.
        drafting: the drafts of a request that may draft; `clear` drops them.
    """

    conclude_state: int | None
    request: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._arrival: Arrival | None = None
        self._failure: str | None = None
        self._metadata_index = -1
        self._first: tuple[int, bool] | None = None  # token, and whether others follow
        self.drafting: Drafting | None = None
        super().__init__(*args, **kwargs)

    def send_metadata(self, kv_indices: Any, aux_index: Any = None, *_: Any, **__: Any) -> None:
        if self.bootstrap_infos is None:
            self._fail("its prefill server is not known")
            return
        manager = self.kv_mgr
        self._metadata_index = aux_index
        self.init_time = time.time()
        if manager.drafts is not None and len(kv_indices):
            self.drafting = manager.drafts.reserve(self.request)
        self._arrival = Arrival(
            manager.pool,
            manager.pages,
            self._peer(),
            manager.secret,
            manager.hello(self.bootstrap_room, len(kv_indices), self.drafting is not None),
            torch.from_numpy(kv_indices.astype(np.int64)),
            manager.after_forward_passes(),
            functools.partial(manager.pass_on, self.request, len(kv_indices)),
            manager.sketch,
            self._look_up_peer,
        )

    def poll(self) -> int:
        if self.conclude_state is not None:
            return self.conclude_state
        arrival = self._arrival
        if arrival is None:
            # Another request of this room may have taken it along.
            status = int(self.kv_mgr.request_status.get(self.bootstrap_room, KVPoll.Failed))
            if status == KVPoll.Failed:
                self.conclude_state = status
            return status
        if time.time() - self.init_time > self.kv_mgr.waiting_timeout:
            arrival.fail(f"it did not come in {self.kv_mgr.waiting_timeout} seconds")
        how = arrival.poll()
        if how == "failed":
            self._fail(arrival.failure)
            self.kv_mgr.forget_peer(self.bootstrap_addr)
        elif arrival.failure is None and arrival.metadata is not None:
            self._use(arrival, arrival.metadata, is_whole=how == "here")
        return KVPoll.Transferring if self.conclude_state is None else self.conclude_state

    def take_in(self) -> None:
        """Put what has come into its rows, and nothing else: generation is paused."""
        if self.conclude_state is None and self._arrival is not None:
            self._arrival.poll()

    def _use(self, arrival: Arrival, metadata: bytes, is_whole: bool) -> None:
        """Stream the first token, draft if all tokens can be read, and verify when all is there."""
        manager, drafting = self.kv_mgr, self.drafting
        if self._first is None:
            manager.write_metadata(self._metadata_index, metadata)
            self._first = manager.release_first_token(self.request, self._metadata_index)
        token, goes_on = self._first
        if is_whole and (drafting is None or manager.drafts.is_verified(drafting)):
            self.conclude_state = KVPoll.Failed if self._failure else KVPoll.Success
        elif drafting is not None and goes_on and not is_whole and arrival.can_be_read:
            manager.drafts.begin(drafting, token)

    def failure_exception(self) -> None:
        with self.kv_mgr.failure_lock:
            recorded = self.kv_mgr.failure_records.pop(self.bootstrap_room, None)
        why = self._failure or recorded or "aborted"
        self.clear()
        raise KVTransferError(self.bootstrap_room, why)

    def abort(self) -> None:
        """Receive no more; with rows, it counts as failed when nothing writes to them."""
        has_rows = self._arrival is not None
        if not has_rows and getattr(self, "bootstrap_infos", None):
            self.send_metadata(np.empty(0, np.int64))  # so that the prefill server hears of it
        if self._arrival is not None:
            self._arrival.fail("aborted")
        if not has_rows:
            self._fail("aborted")
        elif self.conclude_state is None:  # K and V may be whole, and drafts be verified
            self._failure = self._failure or "aborted"

    def _peer(self) -> tuple[str, int]:
        return self.bootstrap_infos[0]["rank_ip"], int(self.bootstrap_infos[0]["rank_port"])

    def _look_up_peer(self) -> tuple[str, int] | None:
        """Ask the bootstrap server where the prefill server listens now, for later requests, too.

        What is known of it stays in its place: the scheduler may be about to read it.
        """
        ranks = self.target_cp_ranks[0], self.target_tp_ranks[0], self.target_pp_ranks[0]
        now = self._get_bootstrap_info_from_server(self.prefill_dp_rank, *ranks)
        if now is None:
            return None
        self.bootstrap_infos[0].update(rank_ip=now["rank_ip"], rank_port=now["rank_port"])
        return self._peer()

    def _register_kv_args(self) -> bool:
        """Each connection says for itself what the new release would register beforehand."""
        return True

    def ensure_abort_notified(self, **_: Any) -> None:
        """The end of the connection has told the prefill server."""

    def clear(self) -> None:
        if self._arrival is not None:
            self._arrival.close()
        if self.drafting is not None:
            self.kv_mgr.drafts.drop(self.drafting)
            self.drafting = None
        self.abort_notified = True  # SGLang's notification is for sockets that we do not use
        super().clear()
        self.kv_mgr.addr_to_rooms_tracker[self.bootstrap_addr].discard(self.bootstrap_room)

    def _fail(self, why: str | None) -> None:
        self._failure = self._failure or why
        self.conclude_state = KVPoll.Failed


CLASSES = {
    KVClassType.KVARGS: KVArgs,
    KVClassType.MANAGER: CodedKVManager,
    KVClassType.SENDER: CodedKVSender,
    KVClassType.RECEIVER: CodedKVReceiver,
    KVClassType.BOOTSTRAP_SERVER: CommonKVBootstrapServer,
}
"""What SGLang asks a backend for."""
