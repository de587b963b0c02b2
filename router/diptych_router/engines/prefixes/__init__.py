"""Which engine has which prefixes: by engines' reports, and by what was just sent to them."""
