"""Schedules: programs, their search, and jobs under them."""
