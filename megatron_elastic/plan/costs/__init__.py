"""Costs: what a layout takes in time, memory, messages and power."""
