"""The trainers and strategies of docs/support.md that shard a model over ranks."""
