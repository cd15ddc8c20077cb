"""Optimizer state in slices: who owns them, who replicates them, how they move and how a step updates them."""
