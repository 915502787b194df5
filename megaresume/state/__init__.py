"""Capture and restore of a run's state, on descriptions: model, optimizer, RNG, scheduler, trainer state."""
