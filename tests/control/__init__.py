"""Control: ``cluster`` and its protocol, without a model."""
