"""Links: messages between ranks of different hosts, each sealed."""
