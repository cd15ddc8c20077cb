"""Simulation: the protocol's ``advance`` among model ranks, agents and networks, under a seeded scheduler."""
