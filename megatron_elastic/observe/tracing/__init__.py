"""Tracing: every operation of some steps, on every rank, and what determined how long they took."""
