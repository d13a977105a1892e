"""Small copies between host and device; on a GPU the same, without stopping its stream."""

from __future__ import annotations

import pytest
import torch

from cache_rank.copies import Readback, upload

TENSORS = (
    torch.tensor([1, 2, 3], dtype=torch.int32),
    torch.tensor([[True, False], [False, True]]),
    torch.tensor([[2**40, -1], [0, 7]]),
    torch.empty((0, 5), dtype=torch.int32),
    torch.tensor(2.5),
    torch.arange(6, dtype=torch.int16).view(2, 3).T,
    torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16),
)


def test_what_is_uploaded_keeps_its_shape_type_and_bits(device: torch.device) -> None:
    uploaded = upload(TENSORS, device)
    assert len(uploaded) == len(TENSORS)
    for tensor, copy in zip(TENSORS, uploaded, strict=True):
        assert copy.device.type == device.type
        assert (copy.shape, copy.dtype) == (tensor.shape, tensor.dtype)
        bits = (t.cpu().contiguous().view(-1).view(torch.uint8) for t in (tensor, copy))
        assert torch.equal(*bits)


def test_an_upload_may_be_overwritten_at_once(device: torch.device) -> None:
    """The host's tensor and the device's do not share memory, nor do two uploads."""
    source = torch.arange(4)
    (first,), (second,) = upload((source,), device), upload((source,), device)
    source.fill_(9)
    second.fill_(8)
    assert first.tolist() == [0, 1, 2, 3]


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def test_a_readback_gives_the_tensor_as_it_was(device: torch.device) -> None:
    readback = Readback()
    tensor = torch.tensor([1.0, 2.0], device=device)
    readback.start(tensor)
    tensor.fill_(5)
    settle(device)
    for _ in range(2):
        value = readback.value()
        assert value is not None
        assert value.device.type == "cpu"
        assert value.tolist() == [1.0, 2.0]


def test_a_later_tensor_takes_the_place_of_one_that_was_not_read(device: torch.device) -> None:
    readback = Readback()
    for tensor in (torch.zeros(3), torch.tensor(7), torch.tensor([8, 9])):
        readback.start(tensor.to(device))
    settle(device)
    value = readback.value()
    assert value is not None
    assert value.tolist() == [8, 9]


@pytest.mark.gpu
def test_uploads_into_memory_lie_at_the_same_places() -> None:
    device = torch.device("cuda")
    memory = torch.empty(4096, dtype=torch.uint8, device=device)
    first = upload(TENSORS, device, memory)
    again = upload(TENSORS, device, memory)
    for one, other, given in zip(first, again, TENSORS, strict=True):
        assert one.data_ptr() == other.data_ptr()
        torch.testing.assert_close(other.cpu(), given, rtol=0, atol=0, equal_nan=True)
