"""Everything that a session changes in Transformer Engine and nvidia-dlfw-inspect, and how it is restored."""
