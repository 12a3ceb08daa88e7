"""The statistics engine: one pass over each tensor in a step, slots on the device, and the reduction over the ranks."""
