"""The blocks of a layer: one file each has its parameters, tensors, forward pass, cache and costs.

A block is a frozen dataclass, static in compiled programs. Nothing else knows what a block is made of:

- `params`, `tensors`: initialisation and sharding; loading, export and adapters
- `run`: the decoder
- `state`: the KV cache
- `costs`: the packer of micro-batches, `flops.py` and the plan
- `splits`, `split_rule`: whether `tp` devices can share it, and the words of the error if not
"""
