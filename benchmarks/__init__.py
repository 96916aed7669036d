"""Measurements: the fused kernel (``kernel``), the update or iteration beside its limit (``step``), and memory."""
