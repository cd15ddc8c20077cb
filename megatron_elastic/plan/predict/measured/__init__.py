"""Measured: tables of measured steps, what is fitted to them, and how far predictions are off."""
