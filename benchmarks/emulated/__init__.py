"""Emulated jobs: which cells are lost (``cases``), by which policy the others go on, and what comes of it (``job``).
``ablation``: what each axis adds.
"""
