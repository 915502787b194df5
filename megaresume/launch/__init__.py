"""Starting a run, and starting it again: the supervisor between Slurm (or a shell) and torchrun, and its decisions."""
