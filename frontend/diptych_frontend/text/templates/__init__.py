"""Chat templates of models."""
