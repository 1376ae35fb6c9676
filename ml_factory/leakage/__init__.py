"""Look-ahead proof: perturb the future, compare the past; fails closed and writes a certificate."""
