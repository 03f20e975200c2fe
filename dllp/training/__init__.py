"""Algorithm 1 at full speed: particles, gates, the step, the run."""
