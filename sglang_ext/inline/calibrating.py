"""Fits the sketches of keys to a loaded model, before the server takes requests.

A sketch codes keys along the directions in which queries vary most. A few thousand tokens of any
text tell them, if they stand at positions from the whole context: rotary embedding turns some
directions so slowly that the beginning of a context shows nothing of them. So the model reads
pieces of texts, each at another position, when it is served for the first time. What is found is
kept in the user's cache folder, under a fingerprint of the weights. Each tensor-parallel rank has
heads of its own, and finds and keeps what belongs to these.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from torch import Tensor
from transformers import AutoTokenizer

from cache_rank.user_cache import cache_folder
from sglang_ext import compat
from sglang_ext.calibration.files import read
from sglang_ext.calibration.key_statistics import KeyBasis, KeyMoments, key_basis
from sglang_ext.calibration.texts import CALIBRATION_TEXTS, LONGEST_TOKEN
from sglang_ext.inline.selection import Heads, Selection
from sglang_ext.server_args import CacheRankServerArgs

logger = logging.getLogger(__name__)

TEXTS = ("tensors", "python", "changes", "tables")
PIECES = 4
"""Of each text."""

TOKENS_ON_GPU, TOKENS_ON_CPU = 1024, 128
"""Tokens of a piece."""

_LEAST_KNOWN = 32
"""Of so many tokens, or more, is a text in any language that a model knows."""

_SAMPLED = 4096
"""So many bytes of each parameter enter the fingerprint."""


def prompts(tokenizer: Any, vocabulary: int, tokens: int) -> Iterator[list[int]]:
    """The pieces that a model reads, in its tokens; random tokens where it has none for a text.

    Raises:
        ValueError: a text is not installed.
    """
    for seed, name in enumerate(TEXTS):
        length = PIECES * tokens
        text = CALIBRATION_TEXTS[name].read()[: LONGEST_TOKEN * length]
        found = [] if tokenizer is None else list(tokenizer(text)["input_ids"][:length])
        # A vocabulary that has no words for it reads one unknown token all the time.
        if len(set(found)) < min(_LEAST_KNOWN, length // 4):
            found = random.Random(seed).choices(range(vocabulary), k=length)
        for start in range(0, len(found), tokens):
            yield found[start : start + tokens]


def load_tokenizer(args: CacheRankServerArgs) -> Any:
    """Load the model's tokenizer, or return None if it has none."""
    try:
        return AutoTokenizer.from_pretrained(
            args.tokenizer_path or args.model_path, trust_remote_code=args.trust_remote_code
        )
    except (OSError, ValueError) as error:
        logger.warning(
            "cache rank: sketches are fitted to random tokens, without a tokenizer: %s", error
        )
        return None


def collect(
    runner: Any, prompts: Iterator[list[int]], heads: Heads, selection: Selection
) -> list[KeyBasis]:
    """Let a model read prompts, the first at the beginning of the context, the last at its end.

    Raises:
        ValueError: a prefill did not show its tokens, and nothing else.
    """
    pieces, context = list(prompts), int(runner.model_config.context_len)
    allocator = runner.token_to_kv_pool_allocator
    rows = allocator.alloc(_whole_pages(max(map(len, pieces)), allocator))
    moments = [
        KeyMoments(heads.kv_heads, heads.head_dim, runner.device) for _ in range(heads.layers)
    ]
    selection.moments = moments
    try:
        for index, tokens in enumerate(pieces):
            position = (context - len(tokens)) * index // max(1, len(pieces) - 1)
            _prefill(runner, tokens, position, rows[: len(tokens)])
        read = sum(map(len, pieces))
        if any(of_layer.tokens != read for of_layer in moments):  # padding is no token
            raise ValueError(
                "sketches cannot be fitted: prefill hides its tokens. Pass "
                "--cuda-graph-backend-prefill disabled, or --calibration FOLDER."
            )
        return [key_basis(of_layer) for of_layer in moments]
    finally:
        selection.moments = None
        allocator.free(rows)


def tokens_of_piece(runner: Any) -> int:
    """How many tokens of a text are read at a time."""
    on_gpu = torch.device(runner.device).type == "cuda"
    room = min(runner.token_to_kv_pool.size, runner.req_to_token_pool.req_to_token.shape[1])
    context = int(runner.model_config.context_len)
    return min(TOKENS_ON_GPU if on_gpu else TOKENS_ON_CPU, room - 1, context)


def has_room(runner: Any) -> bool:
    """Whether the pool has room for what is read at a time."""
    allocator = runner.token_to_kv_pool_allocator
    needed = _whole_pages(tokens_of_piece(runner), allocator)
    return bool(allocator.available_size() >= needed)


def _whole_pages(tokens: int, allocator: Any) -> int:
    return int(-(-tokens // allocator.page_size) * allocator.page_size)


@torch.inference_mode()
def _prefill(runner: Any, tokens: list[int], position: int, rows: Tensor) -> None:
    """Compute a prompt from a position on, in one forward pass and these rows of the pool."""
    count, device = len(tokens), runner.device
    runner.req_to_token_pool.req_to_token[0, :count] = rows.to(torch.int32)

    def one(value: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor([value], dtype=dtype, device=device)

    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=torch.tensor(tokens, dtype=torch.int64, device=device),
        req_pool_indices=one(0, torch.int64),
        seq_lens=one(count, torch.int64),
        seq_lens_cpu=torch.tensor([count]),
        seq_lens_sum=count,
        orig_seq_lens=one(count),
        out_cache_loc=rows,
        positions=torch.arange(position, position + count, device=device),
        extend_num_tokens=count,
        extend_seq_lens=one(count),
        extend_prefix_lens=one(0),
        extend_start_loc=one(0),
        extend_seq_lens_cpu=[count],
        extend_prefix_lens_cpu=[0],
        extend_logprob_start_lens_cpu=[count],
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
    compat.set_real_tokens(batch, count)
    runner.forward(batch)
    runner.req_to_token_pool.req_to_token[0, :count] = 0  # the slot of padding


def fingerprint(model: torch.nn.Module, heads: Heads, context: int) -> str:
    """Name what is fitted to: the heads, the context, and a sample of every parameter."""
    found = hashlib.sha256(f"{heads} {context}".encode())
    for name, parameter in model.named_parameters():
        found.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        raw = parameter.detach().reshape(-1).view(torch.uint8)
        step = max(1, len(raw) // _SAMPLED)
        found.update(raw[::step][:_SAMPLED].cpu().numpy().tobytes())
    return found.hexdigest()[:32]


def cache_file(name: str) -> Path:
    """Where what was fitted to a model is kept."""
    return cache_folder() / "sketches" / f"{name}.safetensors"


def kept(file: Path, heads: Heads) -> list[KeyBasis] | None:
    """Read what is kept, if it is, and whole."""
    try:
        with safe_open(file, "pt") as parts:
            bases = [
                KeyBasis(*(parts.get_tensor(f"{layer}.{part}") for part in KeyBasis._fields))
                for layer in range(heads.layers)
            ]
    except (OSError, SafetensorError):
        return None
    vectors = heads.kv_heads, heads.head_dim
    shapes = (*vectors, heads.head_dim), vectors
    whole = all(
        part.shape == shape and bool(part.isfinite().all())
        for basis in bases
        for part, shape in zip(basis, shapes, strict=True)
    )
    return bases if whole else None


def keep(file: Path, bases: list[KeyBasis]) -> None:
    """Write what was fitted; a server that cannot only has to fit again."""
    tensors = {
        f"{layer}.{part}": tensor.cpu().contiguous()
        for layer, basis in enumerate(bases)
        for part, tensor in zip(KeyBasis._fields, basis, strict=True)
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        save_file(tensors, unfinished)
        unfinished.replace(file)
    except OSError as error:
        logger.warning("cache rank: the calibration is not kept: %s", error)


def of_folder(folder: Path, first: int, heads: Heads, tp_rank: int, tp_size: int) -> list[KeyBasis]:
    """Read a folder that `sglang_ext.calibrate` has written; a rank takes its own heads.

    Raises:
        CalibrationError: it cannot be read.
    """
    card, _, bases = read(folder)
    start = tp_rank * card.kv_heads // tp_size
    own = slice(start, start + heads.kv_heads)
    return [KeyBasis(*(part[own] for part in bases[first + n])) for n in range(heads.layers)]


def calibrate(
    runner: Any,
    selection: Selection,
    heads: Heads,
    tokenizer: Callable[[], Any],
    file: Path,
    tp_group: Any,
) -> list[KeyBasis]:
    """Return what is kept for a loaded model, or fit it and keep it.

    Tensor-parallel ranks compute a prefill together, so that all of them fit if one has to.
    """
    bases = kept(file, heads)
    everybody = torch.tensor(bases is not None, dtype=torch.int32)
    torch.distributed.all_reduce(everybody, torch.distributed.ReduceOp.MIN, group=tp_group)
    if bases is not None and everybody:
        logger.info("cache rank: sketches are as fitted before (%s)", file)
        return bases
    started = time.monotonic()
    tokens = tokens_of_piece(runner)
    logger.info(
        "cache rank: fitting sketches to the model, on %d tokens", tokens * PIECES * len(TEXTS)
    )
    vocabulary = runner.model_config.vocab_size
    bases = collect(runner, prompts(tokenizer(), vocabulary, tokens), heads, selection)
    logger.info("cache rank: sketches fitted in %.1f s (%s)", time.monotonic() - started, file)
    keep(file, bases)
    return bases
