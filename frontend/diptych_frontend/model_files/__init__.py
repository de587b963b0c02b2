"""Models as files: where they come from, what their headers contain, how they are fetched."""
