"""All knowledge of megatron-core: live objects <-> descriptions, parallel state, and the CPU stand-in.

Only this package imports megatron-core (and Transformer Engine or Apex, where they are installed). It knows nothing of
files: everything it hands on is a description with a live tensor in it.
"""
