"""The proof: disturb the future, watch the past; fails closed; writes a certificate."""
