"""Connect an experiment to silos: wait for them, agree on classes and image shape, build the engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from flwr.serverapp import Grid

from uefl.core.errors import ResumableError
from uefl.data.readers.table import NEGATIVE, POSITIVE
from uefl.experiment.experiment import DTYPES, Experiment
from uefl.flower.data_format import DECIDED_BY_SILOS, DataFormat, agree_on_format, check_positive, describe_format
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
    data_format: DataFormat = DECIDED_BY_SILOS,
    on_silo_event: SiloListener = lambda _silo, _activity: None,
) -> FlowerEngine:
    """Return the engine of an experiment with this number of silos; `known_silos` are those of a resumed run.

    `data_format` holds image shape and classes that the coordinator sets; otherwise the majority of silos decides.
    """
    registry = SiloRegistry(grid, experiment.to_config(), policy or RoundPolicy(), on_silo_event)
    silo_infos = registry.wait_for_silos(num_silos, known_silos)
    if positive := experiment.data.table.positive:
        check_positive(silo_infos, positive)
        data_format = data_format._replace(classes=data_format.classes or (NEGATIVE, POSITIVE))
    agreed, reasons = agree_on_format(silo_infos, data_format)
    silo_infos = leave_out_silos(silo_infos, reasons, registry.policy, num_silos)
    for text in (*reasons.values(), *([describe_format(agreed, data_format)] if reasons else [])):
        on_silo_event("", text)
    return FlowerEngine(
        registry,
        experiment.build_network(agreed.image_shape, len(agreed.classes)),
        silo_infos=silo_infos,
        run_id=run_id or experiment.run_id(fingerprint_silos(silo_infos)),
        seed=experiment.seed,
        class_names=agreed.classes,
        image_shape=agreed.image_shape,
        table=agreed.table,
        dtype=DTYPES[experiment.precision],
        half_precision=half_precision,
        on_progress=on_silo_event,
    )


def leave_out_silos(
    silo_infos: Sequence[SiloInfo], reasons: dict[str, str], policy: RoundPolicy, num_silos: int
) -> list[SiloInfo]:
    """Return the silos without a reason against them, if they are enough for a quorum."""
    fitting, quorum = [info for info in silo_infos if info.name not in reasons], policy.compute_quorum(num_silos)
    if len(fitting) < max(quorum, 1):
        listed = "; ".join(reasons.values())
        raise ResumableError(f"only {len(fitting)} of {num_silos} silos can take part; {quorum} are required; {listed}")
    return fitting


def fingerprint_silos(silo_infos: Sequence[SiloInfo]) -> str:
    """Return a hash of what silos report of their data: names, counts, classes."""
    reported = [info[: SiloInfo._fields.index("key")] for info in sorted(silo_infos)]
    return hashlib.sha256(json.dumps(reported).encode()).hexdigest()[:16]
