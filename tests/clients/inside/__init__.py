"""What runs in a client's own process: a spy, and the debugger around the client's training; apart from the rest."""
