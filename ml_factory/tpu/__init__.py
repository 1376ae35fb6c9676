"""Cloud TPU slices through gcloud: requested, prepared, launched, watched, asked for again, deleted."""
