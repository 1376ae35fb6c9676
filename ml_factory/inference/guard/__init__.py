"""Guard of live predictions: checks of the bars, drift of inputs and of calibration, and what follows from each.

Feeds go through `ml_factory.inference.guard.guarded_stream`, single requests through
`ml_factory.inference.guard.request_checks`.
"""
