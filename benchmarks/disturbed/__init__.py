"""Disturbed: what a loss, a slow rank or a change of layout costs, and whether training stays as it was."""
