"""What tests of a compiled program's memory or operations compile with."""

DEFAULT_FUSION = {"xla_cpu_use_fusion_emitters": True}
"""Compiler options that undo the one flag of `conftest.py` that decides which operations XLA fuses on a CPU.

A program then needs the memory and has the operations that it has for users. The other flags change how each
fused operation becomes machine code, and nothing that is counted.
"""
