"""Units of work: what a run, a fold and another machine do alike."""
