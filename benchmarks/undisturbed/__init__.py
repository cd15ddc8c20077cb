"""Undisturbed: what being elastic costs while nothing fails."""
