"""Studies: sets of runs that answer one question, as data; each ends in records and a page made from them."""
