"""Work: which cell computes what, in what order, how fast."""
