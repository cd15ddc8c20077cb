"""Ranks: models of the processes that train: what they hold, send each other, and do in a step."""
