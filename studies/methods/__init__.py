"""Does every method work? All of them, each on the set-up it was made for, beside FedAvg: docs/methods.md.

`python -m studies.methods run` makes the records, `time` measures the cost of a round, `page` writes the page.
"""
