"""The blocks of a layer: one file each has its parameters, tensors, forward pass, cache and costs.

A block is a frozen dataclass, static in compiled programs. Nothing else knows what a block is made of:
`params` and `tensors` are for initialisation, loading, export and adapters, `run` for the decoder, `state`
for the KV cache, `costs` for packing, `flops.py` and the plan, `splits` and `split_rule` for `tp`.
"""
