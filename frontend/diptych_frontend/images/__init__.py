"""Images in prompts: reads them, cuts them into tiles, places them among tokens, and names them."""
