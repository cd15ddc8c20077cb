"""Dynamic communicator: links between ranks, groups as editable views over links, collectives, the torch backend."""

import os

# UCX reads this when it is loaded; ucxx sets variables that mean nothing to it on a machine without a GPU.
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
