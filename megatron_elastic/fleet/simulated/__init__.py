"""Simulated: a cluster's months, from a trace, under a policy."""
