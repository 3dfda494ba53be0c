"""The bytes that the passes between convolutions of the large network move, and what the page says of them."""

import re

import pytest
import torch

from benchmarks.harness import ROOT
from benchmarks.large_network import TINY, Size, count_pass_bytes, make_method, make_network
from benchmarks.tables import read_last_run
from uefl.models.network import Net
from uefl.models.residual_encoder import ResidualEncoder

PASSES = ("pooling", "copies", "elementwise and reductions", "batch norm", "group norm")


def test_the_bytes_of_a_block_are_those_of_its_tensors():
    n, p = 2 * 6 * 6, 2 * 3 * 3
    forward = [n, n, n] + [n, n, n, p]  # statistics, input, output of the first norm; then also the shortcut's values
    backward = [n, p] + [n, p, n, n] + [n, n] + [n, n, n]  # sums and gradients of the second norm, then of the first
    net = Net(ResidualEncoder(image_size=6, width=2, depth=1), 10, (1, 6, 6), hidden_size=4)
    assert count_pass_bytes(net) == 2 * sum(forward + backward) + 3 * p


def test_blocks_add_up_and_the_network_is_not_changed():
    net = make_network(TINY, make_method(TINY))
    before = [t.clone() for t in net.state_dict().values()]
    n = [8 * 28 * 28, 16 * 14 * 14, 32 * 7 * 7]
    p = [8 * 14 * 14, 16 * 7 * 7, 32 * 3 * 3]
    assert count_pass_bytes(net) == sum(30 * a + 9 * b for a, b in zip(n, p))
    assert all(map(torch.equal, before, net.state_dict().values()))
    assert net.encoder.training


@pytest.mark.records
def test_the_page_states_the_share_of_time_that_these_bytes_explain():
    size = Size()
    num_bytes = count_pass_bytes(make_network(size, make_method(size))) * size.images_per_round
    (bound,) = [r for r in read_last_run("many-clients", "gpu") if r["contender"] == "lower bound"]
    gigabytes = float(re.search(r"bytes: ([\d.]+) GB", bound["note"])[1])
    rate = gigabytes * 1e9 * 10 / bound["value"]  # ten steps per round
    seconds = {r["quantity"]: r["value"] for r in read_last_run("large-network", "gpu") if r["contender"] == "uefl"}
    spent = sum(seconds[f"training alone: {kind}"] for kind in PASSES)
    page = " ".join((ROOT / "docs" / "speed.md").read_text().split())
    assert f"must move at least {num_bytes / 1e12:.2f} TB per round" in page
    assert f"{rate / 1e12:.1f} TB/s as in `many-clients`, this takes {num_bytes / rate:.2f} s" in page
    share = f"{100 * num_bytes / rate / spent:.0f} %"
    assert f"which is {share} of the {spent:.2f} s" in page
    assert f"{share} of which their bytes" in " ".join((ROOT / "benchmarks" / "README.md").read_text().split())
