"""Clocks of devices: what sets them, and sets them back however a job ends."""
