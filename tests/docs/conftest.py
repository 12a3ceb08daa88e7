"""Pages have blocks for Accelerate and the Trainer, which keep Accelerate's state in classes."""

from tests.accelerate.conftest import fresh_accelerate_state  # noqa: F401
