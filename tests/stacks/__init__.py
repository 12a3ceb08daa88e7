"""The trainers and strategies of docs/stacks.md that shard a model over ranks."""
