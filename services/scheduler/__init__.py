"""The scheduler: owns every request's lifecycle and tells each worker, step by step, what to run."""
