"""Lynx codes: their ranges, the error of decoding them, and that nothing but the tokens matters."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantization_cases import tokens
from torch import Tensor

from cache_rank.kernels.lynx.attending import FLIPPED, part_instructions
from cache_rank.kernels.lynx.decoding import instructions, table_words
from cache_rank.kernels.lynx.reference import (
    CHUNK,
    LEVELS,
    PAGE,
    LynxCodes,
    align,
    decode_tokens,
    encode_page,
    fraction_of,
)
from cache_rank.kernels.nibbles.reference import unpack_signed

pages = tokens((CHUNK, 3 * CHUNK, PAGE))
alphas = st.sampled_from((0.01, 1.0, 3.0, 50.0))
HALF = torch.finfo(torch.float16)
SINGLE = torch.finfo(torch.float32)


def magnitude_of(level: float, alpha: float) -> float:
    return ((1 + alpha) ** (level / LEVELS) - 1) / alpha


def largest_error(alpha: float, full: bool) -> float:
    """Of a decoded |f|, when nothing else is rounded."""
    if full:
        return magnitude_of(LEVELS, alpha) - magnitude_of(LEVELS - 0.5, alpha)
    errors = []
    for read in range(0, LEVELS, 16):
        for level in (read - 7.5, read + 8.5):
            bounded = magnitude_of(min(max(level, 0), LEVELS), alpha)
            errors.append(abs(bounded - magnitude_of(read, alpha)))
    return max(errors)


def levels_and_signs(codes: LynxCodes) -> tuple[Tensor, Tensor]:
    anchor = unpack_signed(codes.anchor)
    magnitude = torch.where(anchor < 0, -anchor - 1, anchor)
    return 16 * magnitude - unpack_signed(codes.residual), anchor < 0


@given(page=pages, alpha=alphas, full=st.booleans())
def test_decoding_is_within_a_step(page: Tensor, alpha: float, full: bool) -> None:
    codes = encode_page(page, alpha)
    decoded = decode_tokens(align(codes), alpha, full)
    assert decoded.dtype == torch.float32
    assert decoded.shape == page.shape
    spread = align(codes).spread.double()
    # The stored spread may be half a unit of float16 too small, or too small for float16.
    of_spread = largest_error(alpha, full) + HALF.eps
    allowed = codes.span.double() * (spread * of_spread + HALF.smallest_normal * HALF.eps)
    allowed += 4 * SINGLE.eps * (codes.minimum.abs() + codes.span).double() + SINGLE.smallest_normal
    assert ((page.double() - decoded.double()).abs() <= allowed).all()


@given(page=pages)
def test_the_sign_of_the_smallest_elements_is_kept(page: Tensor) -> None:
    codes = encode_page(page)
    _, negative = levels_and_signs(codes)
    quotient = (page.float() - codes.minimum) / codes.span
    normalized = torch.where(codes.span == 0, torch.zeros_like(quotient), quotient)
    assert torch.equal(negative, normalized < align(codes).mean.float())


@pytest.mark.parametrize("alpha", [1.0, 3.0])
def test_codes_are_those_of_the_formula(alpha: float) -> None:
    page = torch.randn(PAGE, 2, generator=torch.Generator().manual_seed(5))
    codes = encode_page(page, alpha)
    levels, negative = levels_and_signs(codes)
    aligned, column = align(codes), page.double()
    element = (column - column.amin(0)) / (column.amax(0) - column.amin(0))
    means = element.unflatten(0, (-1, CHUNK)).mean(1).repeat_interleave(CHUNK, dim=0)
    torch.testing.assert_close(aligned.mean.double(), means, rtol=2**-11, atol=1e-6)
    centred = element - aligned.mean.double()
    fraction = (centred.abs() / aligned.spread.double()).clamp(max=1)
    exact = (alpha * fraction).log1p() / math.log1p(alpha) * LEVELS
    clear = ((exact % 1 - 0.5).abs() > 1e-3) & (centred.abs() > 1e-6)  # no tie, but for float32
    assert clear.sum() > 500
    assert torch.equal(levels[clear], exact.round()[clear].to(levels.dtype))
    assert torch.equal(negative[clear], (centred < 0)[clear])
    magnitude = (exact.round().long() + 7) >> 4
    anchor = torch.where(centred < 0, -magnitude - 1, magnitude)
    assert torch.equal(unpack_signed(codes.anchor)[clear].long(), anchor[clear])


def combined(*words: np.ndarray) -> np.ndarray:
    """What `lop3` makes of three words: the fourth has the results for each case of their bits."""
    *words, table = words
    found = np.zeros_like(words[0])
    for case in range(8):
        if int(table) >> case & 1:
            first, second, third = (
                word if case >> (2 - place) & 1 else ~word for place, word in enumerate(words)
            )
            found = found | first & second & third
    return found


def permuted(low: np.ndarray, high: np.ndarray, choice: np.ndarray) -> np.ndarray:
    """What `prmt` makes of two words: four of their eight bytes."""
    pool = [word >> np.uint32(8 * byte) for word in (low, high) for byte in range(4)]
    found = np.zeros_like(low)
    for place in range(4):
        chosen = choice >> np.uint32(4 * place) & 15
        assert np.all(chosen < 8)
        found = found | (np.choose(chosen, pool) & 255) << np.uint32(8 * place)
    return found


OPERATIONS = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
    "and": lambda a, b: a & b,
    "xor": lambda a, b: a ^ b,
    "sub": lambda a, b: a - b,
    "shr": lambda a, b: a >> b,
    "shl": lambda a, b: a << b,
    "mov": lambda a: a,
    "lop3": combined,
    "prmt": permuted,
}


def run_instructions(text: str, operands: list[np.ndarray], results: int = 4) -> list[np.ndarray]:
    """The results of instructions: as a GPU runs them, by the definitions of PTX."""
    registers = {f"${results + index}": words for index, words in enumerate(operands)}

    def words_of(name: str) -> np.ndarray:
        words = registers[name] if name in registers else np.uint32(int(name, 0))
        return np.ascontiguousarray(np.broadcast_to(words, operands[0].shape))

    for name, arguments in re.findall(r"(\w+\.[\w.]+) ([^;]+);", text.split(";", 1)[1]):
        target, *sources = arguments.replace(" ", "").split(",")
        words = [words_of(source) for source in sources]
        if name.startswith("lop3"):
            words[3] = words[3][0]
        operation = OPERATIONS[name.split(".")[0]]
        if "f16x2" in name:
            halves = [word.view(np.float16).astype(np.float64) for word in words]
            registers[target] = operation(*halves).astype(np.float16).view(np.uint32)
        else:
            registers[target] = operation(*words).astype(np.uint32)
    return [registers[f"${index}"] for index in range(results)]


@pytest.mark.parametrize("alpha", [0.01, 1.0, 10.0, 1000.0])
@pytest.mark.parametrize("in_full", [False, True])
def test_instructions_of_a_gpu_make_fractions_of_every_code(alpha: float, in_full: bool) -> None:
    """Of the 16 anchors and 16 residuals in each of the eight nibbles, beside any others."""
    generator = np.random.default_rng(0)
    count = 20_000
    anchors = generator.integers(0, 1 << 32, count, dtype=np.uint32)
    residuals = generator.integers(0, 1 << 32, count, dtype=np.uint32)
    spreads = generator.uniform(0.25, 1, (4, count, 2)).astype(np.float16)
    spread_words = [np.ascontiguousarray(spread).view(np.uint32)[:, 0] for spread in spreads]
    words = table_words(alpha, torch.device("cpu"))[:, :4].flatten().numpy().view(np.uint32)
    table = [np.full(count, word) for word in words]
    operands = [anchors, residuals, *spread_words, *table]
    found = run_instructions(instructions(alpha, in_full), operands)
    for byte in range(4):
        for is_high in (False, True):
            shift = np.uint32(8 * byte + 4 * is_high)
            anchor = ((anchors >> shift & 15).astype(np.int64) ^ 8) - 8
            residual = ((residuals >> shift & 15).astype(np.int64) ^ 8) - 8
            magnitude = np.where(anchor < 0, -anchor - 1, anchor)
            level = 16 * magnitude - (residual if in_full else 0)
            coded = (level >= 0) & (level <= LEVELS)
            fractions = np.array([fraction_of(level, alpha) for level in range(LEVELS + 1)])
            expected = fractions[np.where(coded, level, 0)]
            spread = spreads[2 * is_high + byte // 2, :, byte % 2].astype(np.float64)
            expected *= np.where(anchor < 0, -spread, spread)
            keys = found[2 * is_high + byte // 2].view(np.float16).reshape(-1, 2)[:, byte % 2]
            error = np.abs(keys.astype(np.float64) - expected)[coded]
            assert error.max() < (8e-4 if in_full else 5e-4)
            assert np.sqrt(np.mean(error**2)) < 2e-4


@pytest.mark.parametrize("alpha", [0.01, 1.0, 10.0, 1000.0])
@pytest.mark.parametrize("in_full", [False, True])
def test_instructions_of_attention_make_elements_of_every_code(alpha: float, in_full: bool) -> None:
    """Of the 16 anchors and 16 residuals in each of the eight nibbles, within 0.15 of a level."""
    generator = np.random.default_rng(0)
    anchors, residuals = generator.integers(0, 1 << 32, (2, 20_000), dtype=np.uint32)
    halves = generator.uniform(0.25, 1, (2, 20_000, 2)).astype(np.float16)
    words = [np.ascontiguousarray(half).view(np.uint32)[:, 0] for half in halves]
    (flipped,) = run_instructions(FLIPPED.value, [anchors], 1)
    fractions = np.array([fraction_of(level, alpha) for level in range(LEVELS + 1)])
    for part, text in enumerate(part_instructions(alpha, in_full)):
        (found,) = run_instructions(text, [flipped, residuals, *words], 1)
        for word in range(2):
            shift = np.uint32(16 * word + part % 2 * 8 + part // 2 * 4)
            anchor = ((anchors >> shift & 15).astype(np.int64) ^ 8) - 8
            residual = ((residuals >> shift & 15).astype(np.int64) ^ 8) - 8
            level = 16 * np.where(anchor < 0, -anchor - 1, anchor) - residual * in_full
            coded = (level >= 0) & (level <= LEVELS)
            fraction = fractions[np.where(coded, level, 0)]
            spread, mean = halves[:, :, word].astype(np.float64)
            expected = mean + spread * np.where(anchor < 0, -fraction, fraction)
            elements = found.view(np.float16).reshape(-1, 2)[:, word].astype(np.float64)
            step = math.log1p(alpha) / LEVELS * (fraction + 1 / alpha) * spread
            rounded = HALF.eps * np.maximum(np.abs(expected), 2**-14) / 2
            error = np.abs(elements - expected) - rounded
            assert (error / step)[coded].max() < 0.15
