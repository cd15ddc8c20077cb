"""Emulated: how fast jobs are on emulated accelerators, after losses and on machines that come and go.

Which cells are lost (``cases``), by which policy the others go on, and what comes of it (``job``); ``ablation``: what
each axis adds.
"""
