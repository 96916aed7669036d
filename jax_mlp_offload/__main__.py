"""``python -m jax_mlp_offload``: see cli.py."""

from __future__ import annotations

import sys

from jax_mlp_offload.cli import main

sys.exit(main())
