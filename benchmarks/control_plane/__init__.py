"""What ``megatron-elastic bench control`` is made of: ranks without a model, the nodes they are on, a coordinator."""
