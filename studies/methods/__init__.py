"""Compare every method with FedAvg on the setup it was made for: docs/methods.md.

`python -m studies.methods run` makes the records, `time` measures the cost of a round, `page` writes the page.
"""
