"""Bytes at rest: shard files, manifest, attempts, commit, retention.

Knows names, JSON and bytes; knows no Megatron, no model and (all but `control.py`) no torch. The on-disk form is
specified in `docs/on-disk-format.md`. Import the modules themselves: this package exports nothing, so that reading a
manifest is cheap.
"""
