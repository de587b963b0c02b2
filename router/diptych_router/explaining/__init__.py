"""Why requests went where they did, and what came true of the predictions."""
