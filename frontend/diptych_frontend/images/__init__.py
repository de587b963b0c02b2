"""Images in prompts: how they are read, cut into tiles, placed among tokens, and named."""
