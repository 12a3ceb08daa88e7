"""What low precision costs and saves in time and memory, expected and measured."""
