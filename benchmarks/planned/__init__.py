"""Planned: what policies decide and predict, and how good what they search for is."""
