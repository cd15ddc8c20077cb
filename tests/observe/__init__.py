"""Observation: records, and what is made of them."""
