"""Without a GPU, the kernels of the baselines run in Triton's interpreter, as all others do."""

import pytest
import torch

if not torch.cuda.is_available():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # Triton reads it when a kernel is defined
        from scripts.baselines.kernels import triton  # noqa: F401
