"""Kernels in Triton's interpreter: a check file run as a program, in a process of its own, because the switch is read at import."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType


def interpreted(checks: ModuleType, timeout: float = 200) -> str:
    """What the program prints. Raises AssertionError with its errors where it fails."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, checks.__file__], env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout
