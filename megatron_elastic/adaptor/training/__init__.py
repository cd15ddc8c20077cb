"""The elastic trainer: the counterpart of Megatron's ``pretrain``, ``train`` and ``train_step``.

    entry          pretrain(); errors reach the coordinator
    life           the loop of a rank: join, stand by, build, step or recover, finish
    building       a rank's part of the model and of the optimizer's state
    step           one step; ``intermission``: what is due before it (an ``evaluation``, a checkpoint)
    interruption   unwind, report, wait for the decision; ``adoption``: make a new layout true
    trainer        what a rank keeps whatever the layout
    tenure         what one layout makes of a member: made anew with each, so that nothing in it outlives the layout
    batches        which samples
"""
