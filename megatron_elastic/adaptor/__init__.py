"""Every touch on Megatron: files say which of its modules they are for, what they change there, and why.

    checkout       Megatron's ``pretrain`` for the scripts of a checkout; ``doctor``, ``targets``: whether one fits
    training/      the elastic trainer
    model/         what a rank computes
    layers/        what Megatron's modules do otherwise: attention, experts, random numbers
    checkpoints/   in Megatron's format
    script/        what surrounds Megatron's loop: arguments, log
    without_cuda/  what Megatron needs on a machine without a GPU
"""

from megatron_elastic.adaptor import lacking

lacking.provide()  # before any of them imports Megatron
