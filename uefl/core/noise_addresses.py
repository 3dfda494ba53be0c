"""Freeze the strings that are hashed into random draws.

A draw is addressed by (seed, silo, round, step, purpose), see `noise.py`. The strings below are therefore part of every
result: another string gives other numbers. They keep their values when the code around them is renamed.
"""

from __future__ import annotations

from types import MappingProxyType

# Purposes of draws.
SILO_SPLIT = "split"
INITIAL_WEIGHTS = "weights"
INITIAL_MODELS = "initial models"
BATCH_ORDER = "order"
TRAINING_STEP = "train"
INITIAL_CLIENT_STATE = "first"
PARTICIPANTS = "who"
EVALUATED_SILOS = "evaluated silos"
INITIAL_CODEWORDS = "first book"
NEW_CODEWORDS = "new"
MERGED_CENTROIDS = "merge"
SILO_CENTROIDS = "centroids"
NOISE_LAYER = "layer"
SAMPLING_PASS = "pass"
NOISE_IMAGE_MEANS = "means"
NOISE_IMAGE_DEVIATIONS = "noise"
VIRTUAL_IMAGES = "virtual"
PSEUDO_IMAGES = "pseudo"
RESIZED_CROP = "resized crop"
COLOR_JITTER = "color jitter"
GRAY_IMAGES = "gray images"
IMAGE_SHIFT = "shift"
SHUFFLED_IMAGES = "cut"
PARTITION = "cut"
SILOS_OF_DOMAIN = "silos"
IMAGES_OF_SILO = "order"
PUBLIC_IMAGES = "public"
PUBLIC_ORDER = "public order"
PUBLIC_STEP = "public step"
SILO_PERMUTATIONS = "silo permutations"
RANDOM_RECEIVERS = "random receivers"
EXPORTED_MASKS = "exported masks"
CALIBRATION_PART = "calibration"
DRIFT_PERMUTATIONS = "drift permutations"
JOIN_FOLDS = "join folds"

# The silo that holds all data in the method `centralized`.
CENTRAL_SILO = "pooled"

# Client tasks, which address the draws of a query.
TASKS = MappingProxyType(
    {
        "evaluate": "measure",
        "compute_centroids": "centroids",
        "compute_image_means": "means",
        "sum_classifier_gradients": "head_gradient",
        "sum_training_losses": "training losses",
    }
)
# Partitioners whose name in the command line differs from the one their draws are addressed by.
PARTITIONERS = MappingProxyType(
    {
        "pathological": "classes",
        "dirichlet-vhl": "vhl",
        "dirichlet-fedbr": "fedbr",
        "dirichlet-fedcr": "fedcr",
    }
)
# Shifts likewise.
SHIFTS = MappingProxyType({"color": "colour"})
