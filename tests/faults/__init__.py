"""Faults: ranks that are killed, hang, raise, are slow or cut off."""
