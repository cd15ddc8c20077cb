"""Faults: who is lost, how that is found, and how training goes on."""
