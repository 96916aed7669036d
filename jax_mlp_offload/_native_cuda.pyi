# The CUDA extension, which is there only where the package was built with nvcc. accelerators.py alone imports it.
from typing import Any

INTERFACE_VERSION: int
CUDA_VERSION: int

def runtime() -> Any: ...
