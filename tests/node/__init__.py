"""Nodes: their processes, what holds them, and what they are allowed."""
