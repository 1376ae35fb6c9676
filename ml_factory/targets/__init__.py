"""Labels, sample weights, splits and the search for barriers."""
