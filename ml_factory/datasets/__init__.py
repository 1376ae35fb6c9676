"""Prepared data sets: store, scaling, preprocessing, windows."""
