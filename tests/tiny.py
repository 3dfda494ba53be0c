"""A federation small enough for tests, on real digits, through the command line's own words."""

TINY = [
    "train=40",
    "test=20",
    "width=4",
    "hidden=16",
    "words=8",
    "rounds=3",
    "extra_rounds=2",
    "iterations=2",
    "epochs=1",
    "batch=20",
    "passes=3",
    "gamma=0",
    "errors=0",
]
BARE = [word for word in TINY if word.partition("=")[0] not in ("words", "gamma", "errors")]  # without a codebook
