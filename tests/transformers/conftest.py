"""The Trainer keeps Accelerate's state in classes, and its integrations write where the environment says."""

from tests.accelerate.conftest import fresh_accelerate_state, offline_trackers  # noqa: F401
