"""Asking: what people want of a running job."""
