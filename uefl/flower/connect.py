"""Connect an experiment to silos: wait for them, agree on classes and image shape, build the engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from flwr.serverapp import Grid

from uefl.core.errors import InputError
from uefl.data.readers.labeled_files import index_names
from uefl.experiment.experiment import DTYPES, Experiment
from uefl.flower.engine import FlowerEngine
from uefl.flower.silo_registry import RoundPolicy, SiloInfo, SiloListener, SiloRegistry


def connect(
    grid: Grid,
    experiment: Experiment,
    *,
    num_silos: int,
    policy: RoundPolicy | None = None,
    half_precision: bool = False,
    run_id: str = "",
    known_silos: Sequence[SiloInfo] = (),
    on_silo_event: SiloListener = lambda _silo, _activity: None,
) -> FlowerEngine:
    """Return the engine of an experiment with this number of silos; `known_silos` are those of a resumed run."""
    registry = SiloRegistry(grid, experiment.to_config(), policy or RoundPolicy(), on_silo_event)
    silo_infos = registry.wait_for_silos(num_silos, known_silos)
    image_shape, class_names = agree_on_shape_and_classes(silo_infos)
    return FlowerEngine(
        registry,
        experiment.build_network(image_shape, len(class_names)),
        silo_infos=silo_infos,
        run_id=run_id or experiment.run_id(fingerprint_silos(silo_infos)),
        seed=experiment.seed,
        class_names=class_names,
        image_shape=image_shape,
        dtype=DTYPES[experiment.precision],
        half_precision=half_precision,
        on_progress=on_silo_event,
    )


def agree_on_shape_and_classes(silo_infos: Sequence[SiloInfo]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the common shape of all images, and the classes of all silos together."""
    shapes = {info.image_shape: info.name for info in silo_infos}
    if len(shapes) > 1:
        listed = ", ".join(f"{'×'.join(map(str, shape))} at {name}" for shape, name in shapes.items())
        raise InputError(f"silos have images of different shapes ({listed}); set data.image_size")
    orders = {info.classes for info in silo_infos}
    if len(orders) == 1:
        return silo_infos[0].image_shape, orders.pop()
    return silo_infos[0].image_shape, index_names([name for info in silo_infos for name in info.classes])[0]


def fingerprint_silos(silo_infos: Sequence[SiloInfo]) -> str:
    """Return a hash of what silos report of their data: names, counts, classes."""
    return hashlib.sha256(json.dumps(sorted(silo_infos)).encode()).hexdigest()[:16]
