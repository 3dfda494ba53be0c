"""Rounds in groups of alike silos over Flower: the server accepts centroids of both halves, and nothing differs."""

from dataclasses import replace

import pytest
from small_federation import SILOS, make_experiment, make_flower_engine, make_grid, make_serial_engine, run_rounds


@pytest.mark.parametrize("min_examples", [10, 1])
def test_groups_over_flower_are_those_of_the_serial_engine(min_examples, tmp_path):
    plain = make_experiment("uefl")
    codebook = plain.method.codebook
    codebook = replace(codebook, min_examples=min_examples)
    experiment = make_experiment("uefl", extra_rounds=2, group_rounds=2, codebook=codebook)
    serial, flower = (
        run_rounds(engine, experiment)
        for engine in (make_serial_engine(experiment), make_flower_engine(make_grid(tmp_path), experiment))
    )
    assert ["groups" in record for record in flower[1]] == [False, False, True, True]
    assert [r["bytes_up"] for r in flower[1]] == [r["bytes_up"] for r in serial[1]]
    records = [r[-1] for _, r in (serial, flower)]
    assert sorted(name for group in records[0]["groups"] for name in group) == sorted(SILOS)
    assert records[0]["groups"] == records[1]["groups"]
    assert not any("rejected" in silo for silo in records[1]["silos"].values())
    for name in SILOS:
        assert records[0]["silos"][name]["nll"] == pytest.approx(records[1]["silos"][name]["nll"], rel=1e-9)
