"""The `megaresume` command."""
