"""Emulation: a rank behaves as one accelerator of a given speed. It computes next to nothing, and sleeps out the rest.

    profile       what the accelerator, its links and its power are like; the file of ``--elastic-emulate``
    models        published shapes; ``accelerators``: stated figures; ``derive``: a profile from both; ``command``
    forecast      a step's time by a profile, without a job
    clocks        at which devices run; may be set from outside
    accelerator   the device at run time: busy until when, with how much memory in use, with how many joules drawn
    executor      units take their time, and messages between stages theirs; ``reduction``: so do gradients and weights
"""
