"""Control plane: what control costs as jobs grow, and what strangers do to it.

``control`` is made of ranks without a model, the nodes they are on, and a coordinator.
"""
