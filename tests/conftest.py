"""Tests marked `gpu` need a CUDA device; ranks that tests started end with the session. Every process has one thread: ranks
share the cores, and a sum over threads is another sum."""
import sys

import pytest
import torch
from ranks import close_ranks


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Variants of a compiled function are limited in number: a test leaves the next none."""
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture(scope="session", autouse=True)
def ranks_end():
    yield
    close_ranks()


def pytest_benchmark_update_machine_info(config, machine_info):
    """What a time depends on; `triaxis gate compare` refuses to compare other hardware."""
    from suite.machine import Machine
    from suite.measure.provenance import cpu_name, versions

    machine = Machine.here()
    machine_info.pop("node", None)
    clocks = None
    if machine.gpus:
        import pynvml

        pynvml.nvmlInit()
        clocks = pynvml.nvmlDeviceGetMaxClockInfo(pynvml.nvmlDeviceGetHandleByIndex(0), pynvml.NVML_CLOCK_SM)
    machine_info |= {"processor": cpu_name(), "gpu": [gpu.name for gpu in machine.gpus], "gpu_clocks": clocks,
                     "driver": machine.driver, **versions()}
