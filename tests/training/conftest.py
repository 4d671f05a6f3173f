"""What the training tests share."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def quick_compile() -> Iterator[None]:
    """Programs that run a few steps are not worth optimising: compile them as they are."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
