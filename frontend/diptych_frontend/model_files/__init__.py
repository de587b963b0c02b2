"""Models as files: where they come from, what their headers say, how they are fetched."""
