"""Results of the pipeline: facts, a summary to read, a figure."""
