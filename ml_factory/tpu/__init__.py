"""Cloud TPU slices through gcloud: requested, prepared, launched, watched, requested again, deleted."""
