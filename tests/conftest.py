"""Tests marked `gpu` need a CUDA device; ranks that tests started end with the session."""
import pytest
import torch
from ranks import close_ranks


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def ranks_end():
    yield
    close_ranks()
