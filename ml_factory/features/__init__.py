"""What we knew then: bars in, columns out, past only."""
