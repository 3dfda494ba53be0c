"""The strings that address random draws are frozen: changing one changes every result."""

from uefl.algorithms import METHODS
from uefl.core import noise_addresses
from uefl.core.noise import derive_key
from uefl.data import PARTITIONERS
from uefl.data.shifts import SHIFTS

FROZEN = {
    "SILO_SPLIT": "split",
    "INITIAL_WEIGHTS": "weights",
    "INITIAL_MODELS": "initial models",
    "BATCH_ORDER": "order",
    "TRAINING_STEP": "train",
    "INITIAL_CLIENT_STATE": "first",
    "PARTICIPANTS": "who",
    "EVALUATED_SILOS": "evaluated silos",
    "INITIAL_CODEWORDS": "first book",
    "NEW_CODEWORDS": "new",
    "MERGED_CENTROIDS": "merge",
    "SILO_CENTROIDS": "centroids",
    "NOISE_LAYER": "layer",
    "SAMPLING_PASS": "pass",
    "NOISE_IMAGE_MEANS": "means",
    "NOISE_IMAGE_DEVIATIONS": "noise",
    "RESIZED_CROP": "resized crop",
    "COLOR_JITTER": "color jitter",
    "GRAY_IMAGES": "gray images",
    "IMAGE_SHIFT": "shift",
    "SHUFFLED_IMAGES": "cut",
    "PARTITION": "cut",
    "SILOS_OF_DOMAIN": "silos",
    "IMAGES_OF_SILO": "order",
    "CENTRAL_SILO": "pooled",
    "VIRTUAL_IMAGES": "virtual",
    "PSEUDO_IMAGES": "pseudo",
    "PUBLIC_IMAGES": "public",
    "PUBLIC_ORDER": "public order",
    "PUBLIC_STEP": "public step",
    "SILO_PERMUTATIONS": "silo permutations",
    "RANDOM_RECEIVERS": "random receivers",
    "EXPORTED_MASKS": "exported masks",
    "CALIBRATION_PART": "calibration",
    "DRIFT_PERMUTATIONS": "drift permutations",
    "JOIN_FOLDS": "join folds",
}


def test_table_of_addresses_is_frozen():
    constants = {n: v for n, v in vars(noise_addresses).items() if n.isupper() and isinstance(v, str)}
    assert constants == FROZEN
    assert noise_addresses.TASKS == {
        "evaluate": "measure",
        "compute_centroids": "centroids",
        "compute_image_means": "means",
        "sum_classifier_gradients": "head_gradient",
        "sum_training_losses": "training losses",
    }
    assert noise_addresses.PARTITIONERS == {
        "pathological": "classes",
        "dirichlet-vhl": "vhl",
        "dirichlet-fedbr": "fedbr",
        "dirichlet-fedcr": "fedcr",
    }
    assert noise_addresses.SHIFTS == {"color": "colour"}


def test_every_renamed_task_partitioner_and_shift_exists():
    tasks = {task for name in METHODS for task in METHODS[name]().client_tasks}
    assert noise_addresses.TASKS.keys() <= tasks
    assert noise_addresses.PARTITIONERS.keys() <= set(PARTITIONERS)
    assert noise_addresses.SHIFTS.keys() <= set(SHIFTS)


def test_key_depends_on_every_part_of_its_address():
    keys = {derive_key(0, "north", 1, "who"), derive_key(0, "north", 1, "order"), derive_key(0, "north", "1", "who")}
    assert len(keys) == 3
    assert derive_key(0, "north", 1, "who") == 2324050995445019813  # of version 0.1
