"""The trainers and strategies of docs/start.md that shard a model over ranks."""
