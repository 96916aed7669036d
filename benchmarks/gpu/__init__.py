"""The parts of ``benchmarks.gpu_check``: each measures one thing on an accelerator, in a process of its own."""
