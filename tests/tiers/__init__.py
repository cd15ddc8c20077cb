"""Tiers: which tests run when, what becomes of one that fails, and the commands that run them again and again."""
