"""Dynamic communicator: links between ranks, groups as editable views over links, collectives, the torch backend."""
