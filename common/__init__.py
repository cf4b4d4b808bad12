"""What all three kinds of process share: the wire contract, its codec and transport, errors, configuration."""
