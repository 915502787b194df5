"""Parts of `bench_store.py`."""
