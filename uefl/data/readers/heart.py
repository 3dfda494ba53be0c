"""Heart disease of four hospitals, which ships with this package (uefl/data/embedded/README.md names its authors)."""

from __future__ import annotations

from pathlib import Path

from uefl.data.images import Images
from uefl.data.partitioners.partition import USE_ALL_IMAGES
from uefl.data.readers.context import ReadContext
from uefl.data.readers.table import read_training_table
from uefl.data.sources import Source
from uefl.data.table_config import TableConfig

HEART_FILE = Path(__file__).parents[1] / "embedded" / "heart_disease_uci.csv"

HEART_TABLE = TableConfig(
    label="num",
    positive=("above:0",),  # 0: no narrowing of a vessel by more than half; 1 to 4: vessels with disease
    silo="dataset",
    ignore=("id",),
    numeric=("age", "trestbps", "chol", "thalch", "oldpeak", "ca"),
    boolean=("fbs", "exang"),
    levels=(
        "sex=Female,Male",
        "cp=asymptomatic,atypical angina,non-anginal,typical angina",
        "restecg=normal,lv hypertrophy,st-t abnormality",
        "slope=upsloping,flat,downsloping",
        "thal=normal,fixed defect,reversable defect",
    ),
    missing=("chol=0", "trestbps=0"),  # recorded as 0 where they were not measured
)


def read_heart(_: Path, context: ReadContext) -> Images:
    """Read 920 patients of four hospitals with and without heart disease."""
    return read_training_table("heart", HEART_FILE, context)


HEART = Source(
    reader=read_heart,
    is_embedded=True,
    is_table=True,
    default_settings={"partitioner": "natural", "table": HEART_TABLE, **USE_ALL_IMAGES},
)
