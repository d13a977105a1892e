"""The host time of a step is measured on the inference rank's code, and a real cache rank."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.thorough
def test_host_time_of_sparse_steps_and_a_start_are_measured() -> None:
    options = ["--steps", "120", "--batches", "1", "3", "--starts", "1"]
    command = [sys.executable, "-m", "scripts.measure_host_time", *options]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=200)
    found = json.loads(said.stdout.splitlines()[-1])
    assert [*found["microseconds"]] == ["1", "3"]
    for parts in found["microseconds"].values():
        assert len(parts) == 6
        assert min(parts.values()) > 0
    assert len(found["start_seconds"]) == 1
