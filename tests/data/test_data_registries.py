"""The registries of data sets and partitioners."""

import subprocess
import sys

from uefl.data import PARTITIONERS, SOURCES
from uefl.data.partitioners.partition import Partitioner
from uefl.data.sources import Source


def test_listing_data_sets_and_partitioners_does_not_import_torch() -> None:
    names = "import sys; from uefl.data import PARTITIONERS, SOURCES; list(SOURCES); list(PARTITIONERS); "
    code = names + "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_entry_can_be_loaded_and_has_a_description() -> None:
    assert all(isinstance(source, Source) for source in SOURCES.values())
    assert all(isinstance(partitioner, Partitioner) for partitioner in PARTITIONERS.values())
    assert all(SOURCES.describe(name) for name in SOURCES)
    assert all(PARTITIONERS.describe(name) for name in PARTITIONERS)
