"""Several experiments in parallel: how many processes."""

import pytest

from uefl.experiment import parallel_runs
from uefl.experiment.parallel_runs import choose_workers


@pytest.mark.parametrize(
    ("workers", "num_runs", "device", "expected"),
    [
        (0, 50, "cpu", 16),  # one per core
        (0, 3, "cpu", 3),  # no more than runs
        (0, 50, "cuda:0", 4),  # processes compete for a GPU
        (14, 50, "cuda", 14),  # as the user says
    ],
)
def test_without_a_number_there_is_one_process_per_core_but_few_on_cuda(
    workers, num_runs, device, expected, monkeypatch
):
    monkeypatch.setattr(parallel_runs.os, "cpu_count", lambda: 16)
    assert choose_workers(workers, num_runs, device) == expected
