"""Code in a client's own process: a spy, and the debugger around the client's training."""
