"""OpenAI's Files and Batches API: requests in a file, answered when there is room."""
