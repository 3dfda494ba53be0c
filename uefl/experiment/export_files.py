"""Write a silo's model as ONNX or as a program of torch.export, and check the file before it gets its name."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from uefl.core.errors import InputError
from uefl.core.noise import derive_key, random_bits
from uefl.experiment.exporting import OUTPUTS, ExportedNetwork, ExportInput, describe_export, describe_input
from uefl.experiment.files import make_temporary_path, replace_file
from uefl.experiment.silo_models import SiloModels
from uefl.experiment.trained_model import TrainedModel

SUFFIXES = (".onnx", ".pt2")
METADATA_FILE = "uefl.json"  # in a .pt2 file
CHECKED_BATCHES = (1, 2, 7)  # the batch is dynamic
MAX_DIFFERENCE = 1e-3  # of a probability
Run = Callable[[Tensor], list[np.ndarray[Any, Any]]]


class ExportCheck(NamedTuple):
    """Largest differences between a file and the model it was made from."""

    probabilities: float  # from those of `predict`
    outputs: float  # of all outputs, from the same graph in PyTorch
    entropy: float  # mean over examples, from that of `predict`, whose masks differ


class ExportResult(NamedTuple):
    """A written file, its metadata and how well it agrees."""

    path: Path
    metadata: dict[str, str]
    input: ExportInput
    check: ExportCheck


def check_export_path(path: Path) -> None:
    """Check that a file can be written here, and that the packages for its format are installed."""
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path} must end in {' or '.join(SUFFIXES)}")
    if path.exists():
        raise InputError(f"{path} exists; choose another file")
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: {path.parent} is not a folder")
    require_packages(path.suffix)


def export_model(
    models: SiloModels, silo_name: str, path: Path, *, run_name: str = "", mc_samples: int | None = None
) -> ExportResult:
    """Write the model of a silo, or without a name the one that all share; an existing file is never overwritten."""
    check_export_path(path)
    silo_name = silo_name or models.description.owner
    model = models.build(silo_name)
    network = ExportedNetwork(model, mc_samples)
    exported_input, metadata = describe_input(model), describe_export(models, network, silo_name, run_name)
    write, open_file = (write_onnx, open_onnx) if path.suffix == ".onnx" else (write_program, open_program)
    temporary = make_temporary_path(path).with_suffix(path.suffix)
    try:
        with silence_exporters():
            write(network, exported_input, metadata, temporary)
        check = check_file(open_file(temporary), network, model, exported_input)
        replace_file(temporary, path)
    except OSError as e:
        raise InputError(f"cannot write {path}: {(e.strerror or str(e)).lower()}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return ExportResult(path, metadata, exported_input, check)


def require_packages(suffix: str) -> None:
    """Raise an `InputError` that names the extra if ONNX is not installed."""
    if suffix != ".onnx":
        return
    for name in ("onnx", "onnxruntime", "onnxscript"):
        try:
            __import__(name)
        except ImportError:
            raise InputError(
                f"a file .onnx needs {name}: install uefl with its extra `onnx`, or write a .pt2"
            ) from None


@contextmanager
def silence_exporters() -> Iterator[None]:
    """Hide what exporters say about their own progress; errors still pass."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


# --- the two formats --------------------------------------------------------------------------------------------------


def write_onnx(network: ExportedNetwork, exported_input: ExportInput, metadata: dict[str, str], path: Path) -> None:
    """Write an ONNX file with its metadata."""
    import onnx

    program = torch.onnx.export(
        network,
        (make_examples(exported_input, 3, network),),
        input_names=[exported_input.name],
        output_names=list(OUTPUTS),
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    proto = program.model_proto
    for node in proto.graph.node:  # the exporter writes the lines of source code, with the paths of this machine
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    onnx.helper.set_model_props(proto, metadata)
    onnx.checker.check_model(proto)
    path.write_bytes(proto.SerializeToString())


def open_onnx(path: Path) -> Run:
    """Return a function that runs an ONNX file on a CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (name,) = [node.name for node in session.get_inputs()]

    def run(x: Tensor) -> list[np.ndarray[Any, Any]]:
        outputs: list[np.ndarray[Any, Any]] = session.run(list(OUTPUTS), {name: x.numpy()})
        return outputs

    return run


def write_program(network: ExportedNetwork, exported_input: ExportInput, metadata: dict[str, str], path: Path) -> None:
    """Write a program of torch.export with its metadata."""
    batch = torch.export.Dim("batch")
    example = make_examples(exported_input, 3, network)
    program = torch.export.export(network, (example,), dynamic_shapes=({0: batch},))
    for module in program.graph_module.modules():
        for node in getattr(module, "graph", torch.fx.Graph()).nodes:
            node.meta.pop("stack_trace", None)  # lines of source code, with the paths of this machine
    content = io.BytesIO()  # PyTorch's own errors of writing a file have no common type
    torch.export.save(program, content, extra_files={METADATA_FILE: json.dumps(metadata, sort_keys=True)})
    path.write_bytes(content.getvalue())


def open_program(path: Path) -> Run:
    """Return a function that runs a program of torch.export."""
    module = torch.export.load(path).module()

    def run(x: Tensor) -> list[np.ndarray[Any, Any]]:
        with torch.no_grad():
            return [output.numpy() for output in module(x)]

    return run


# --- the check --------------------------------------------------------------------------------------------------------


def make_examples(exported_input: ExportInput, count: int, network: ExportedNetwork, key: int = 0) -> Tensor:
    """Return random raw inputs: pixels, cells with missing ones, tokens 0 and 1, or numbers."""
    shape = (count, *exported_input.shape)
    bits = (random_bits(derive_key(key, "export"), torch.Size(shape).numel()) & 0xFFFF).reshape(shape)
    if exported_input.name == "pixels":
        return (bits & 0xFF).to(torch.uint8)
    if exported_input.name == "tokens":
        return (bits & 1).to(torch.int64)
    if network.table is None:
        return (bits / 0x8000 - 1).to(exported_input.dtype)
    columns = []
    for column, values in zip(network.table.columns, bits.T):
        if column.kind == "numeric":
            cells = column.mean + column.std * (values / 0x4000 - 2)
        else:
            cells = values % (len(column.levels) or 2)
        columns.append(torch.where(values % 7 == 0, torch.nan, cells.double()))
    return torch.stack(columns, 1)


def check_file(run: Run, network: ExportedNetwork, model: TrainedModel, exported_input: ExportInput) -> ExportCheck:
    """Compare a file with its model on random inputs of several batch sizes; too large a difference is an error."""
    differences = []
    for count in CHECKED_BATCHES:
        x = make_examples(exported_input, count, network, key=count)
        with torch.no_grad():
            expected = [output.numpy() for output in network(x)]
        outputs = run(x)
        predictions = model.predict(network.table.encode(x) if network.table else x, mc_samples=network.num_samples)
        differences.append(
            ExportCheck(
                float(np.abs(outputs[1] - predictions.probabilities).max()),
                max(float(np.abs(a - b).max()) for a, b in zip(outputs, expected)),
                float(np.abs(outputs[2] - predictions.uncertainty.entropy).mean()),
            )
        )
    check = ExportCheck(*(max(values) for values in zip(*differences)))
    if not max(check.probabilities, check.outputs) <= MAX_DIFFERENCE:
        raise InputError(
            f"the exported model differs from `predict` by {check.probabilities:.2g} in a probability, and from its "
            f"graph by {check.outputs:.2g}; at most {MAX_DIFFERENCE:g} is allowed, so no file was written"
        )
    return check
