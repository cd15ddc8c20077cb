"""Encoding: layouts as bytes, whole or as what is different."""
