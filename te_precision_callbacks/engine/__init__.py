"""The statistics engine: one pass over each tensor, slots on the device, and the reduction over ranks."""
