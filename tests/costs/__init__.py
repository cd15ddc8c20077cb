"""Costs: time, memory, messages and clocks, foreseen and measured."""
