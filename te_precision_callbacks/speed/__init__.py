"""What low precision costs and what it buys, in time and memory."""
