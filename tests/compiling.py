"""How the tests compile: cheaply, or as for users where they count a program's bytes or operations."""

import jax

OTHER_FUSION_EXISTS = jax.__version_info__ < (0, 11, 1)
"""Whether XLA can fuse operations on a CPU without its fusion emitters; it ends a process that sets a flag
it doesn't know."""

CHEAP_COMPILATION = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    *(("--xla_cpu_use_fusion_emitters=false",) if OTHER_FUSION_EXISTS else ()),
)
"""Compiling is most of what the tests cost on a CPU; with these flags XLA takes about a third of the time.

The programs compute the same up to rounding and run slower. Tests that count a program's bytes or operations
compile it with `DEFAULT_FUSION`.
"""

DEFAULT_FUSION = {"xla_cpu_use_fusion_emitters": True} if OTHER_FUSION_EXISTS else {}
"""Compiler options that undo the one flag above that decides which operations XLA fuses on a CPU.

A program then needs the memory and has the operations that it has for users. The other flags change how each
fused operation becomes machine code, and nothing that is counted.
"""
