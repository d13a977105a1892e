"""Kernel tests run on the CPU in Triton's interpreter, and on a GPU when there is one."""

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where kernels run: the interpreter's tensors live on the CPU."""
    if torch.cuda.is_available() and request.param == "cpu":
        pytest.skip("the GPU runs it")
    return torch.device(request.param)
