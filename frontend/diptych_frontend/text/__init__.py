"""Between what people write and what models compute: templates, tokens, options, answers."""
