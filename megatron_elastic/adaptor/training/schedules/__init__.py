"""Schedules: what follows from the number of a step, whoever does it."""
