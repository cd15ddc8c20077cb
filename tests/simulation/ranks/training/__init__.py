"""What a model rank does: the counterpart of ``adaptor.training``, module for module.

    life           the loop of a rank: join, stand by, build, step or recover, finish
    building       a rank's part of the model and of the optimizer's state
    step           one step; ``intermission``: what is due before it (a checkpoint); ``verification``: before its vote
    interruption   unwind, report, wait for the decision; ``adoption``: make a new layout true
    parameters     what a rank computes with
    tenure         what one layout makes of a member: made anew with each

Functions that wait are generators; ``tests.simulation.ranks.rank`` says what they yield.
"""
