# The extension's types are told where native.py binds its names.
from typing import Any

def __getattr__(name: str) -> Any: ...
